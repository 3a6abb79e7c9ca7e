"""Tasks: conversations by index, and scores of what a model says in them.

A conversation is `{"messages": [{"role", "content"}, ...], ...}` with further keys that its score reads, such as
`answers`. It is a function of its index alone, the order of a mixture one of its seed.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self, overload

import numpy as np

Conversation = Mapping[str, Any]
Score = Callable[[Conversation, str], float]  # conversation, completion -> [0, 1], higher is better


class Task(Sequence[Conversation]):
  """Examples that become conversations when they are asked for; a slice is a view of the same examples."""

  def __init__(
    self,
    name: str,
    examples: Sequence[Any],
    to_conversation: Callable[[Any], Conversation],
    evaluate: Score | None = None,
    reward: Score | None = None,
  ):
    """Make a task of all the examples. Without `reward`, what is evaluated is rewarded."""
    self.name = name
    self._examples, self._to_conversation = examples, to_conversation
    self._evaluate, self._reward = evaluate, reward or evaluate
    self._rows: Sequence[int] | np.ndarray = range(len(examples))

  def __len__(self) -> int:
    return len(self._rows)

  @overload
  def __getitem__(self, index: int) -> Conversation: ...
  @overload
  def __getitem__(self, index: slice) -> Self: ...
  def __getitem__(self, index):
    """Return a conversation, or the view of a slice, whose bounds are Python's.

    Raises IndexError for an index outside the task, negative ones included: an index that is computed from a step is
    never meant to count from the end.
    """
    if isinstance(index, slice):
      return self._view(self._rows[index])
    return self._to_conversation(self._examples[self._row(index)])

  def __iter__(self) -> Iterator[Conversation]:
    # the loop that Python makes of __getitem__ takes any IndexError for the end
    return map(self.__getitem__, range(len(self)))

  def select(self, indices: Sequence[int]) -> Self:
    """Return the view of the examples with these indices, in this order. Raises IndexError like `[]`."""
    return self._view([self._row(index) for index in indices])

  def evaluate(self, conversation: Conversation, completion: str) -> float:
    """Score a completion of one of the task's conversations. Raises ValueError if the task has no score."""
    return self._scored(self._evaluate, conversation, completion)

  def reward(self, conversation: Conversation, completion: str) -> float:
    """Return the reward of a completion for reinforcement. Raises ValueError if the task has no score."""
    return self._scored(self._reward, conversation, completion)

  def _scored(self, score: Score | None, conversation: Conversation, completion: str) -> float:
    if score is None:
      raise ValueError(f"{self.name} has no score: its conversations have no right answer, they can only be trained on")
    return score(conversation, completion)

  def _row(self, index: int) -> int:
    if not 0 <= index < len(self):
      raise IndexError(f"example {index} of {self.name}, which has {len(self)} examples: indices begin at 0")
    return int(self._rows[index])

  def _view(self, rows: Sequence[int] | np.ndarray) -> Self:
    view = copy.copy(self)
    view._rows = rows
    return view


def mixed(task: Task, other: Task, share: float, seed: int = 0) -> Task:
  """Return a view of `task` in which `share` of the conversations, drawn by the seed, are drawn from `other` instead.

  `task` may be endless, unlike those of a `TaskMixture`. The conversations are for training: they have no score.
  """

  def find(index: int) -> Conversation:
    rng = np.random.default_rng([seed, index])
    return other[int(rng.integers(len(other)))] if rng.random() < share else task[index]

  return Task(f"{task.name}_and_{other.name}", range(len(task)), find)


class TaskSequence(Task):
  """The examples of several tasks, one task after the other; a task that is given twice comes twice.

  The conversations have the further key `task_path`: the number of their task, and if that has tasks itself, the
  number within it, and so on. By it, completions are scored by the task that asked.
  """

  def __init__(self, tasks: Sequence[Task], name: str = "sequence"):
    """Raises ValueError if there is no task."""
    if not tasks:
      raise ValueError(f"the {name} has no tasks; give at least one")
    self.tasks = tuple(tasks)
    self._ends = np.cumsum([len(task) for task in tasks])
    super().__init__(name, range(self._ends[-1]), self._find)

  def evaluate(self, conversation: Conversation, completion: str) -> float:
    """Score a completion by the task that the conversation came from."""
    task, inner = self._origin(conversation)
    return task.evaluate(inner, completion)

  def reward(self, conversation: Conversation, completion: str) -> float:
    """Reward a completion by the task that the conversation came from."""
    task, inner = self._origin(conversation)
    return task.reward(inner, completion)

  def _find(self, place: int) -> Conversation:
    number = int(np.searchsorted(self._ends, place, side="right"))  # tasks without examples are passed over
    task = self.tasks[number]
    inner = task[place - int(self._ends[number]) + len(task)]
    return {**inner, "task_path": (number, *inner.get("task_path", ()))}

  def _origin(self, conversation: Conversation) -> tuple[Task, Conversation]:
    path = conversation.get("task_path")
    if not path or not 0 <= path[0] < len(self.tasks):
      raise ValueError(f"the conversation is not from this {self.name}: its task_path is {path}")
    return self.tasks[path[0]], {**conversation, "task_path": path[1:]}


class TaskMixture(TaskSequence):
  """The examples of several tasks, shuffled by a seed; a task that is given twice counts twice."""

  def __init__(self, tasks: Sequence[Task], seed: int = 0, name: str = "mixture"):
    """Raises ValueError if there is no task."""
    super().__init__(tasks, name)
    self._rows = np.random.default_rng(seed).permutation(len(self))
