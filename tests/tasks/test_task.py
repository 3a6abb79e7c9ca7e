"""Tasks by index: slices are views, a seed shuffles mixtures, and completions are scored where they came from."""

import pytest

from selfrag_jax.tasks.task import Task, TaskMixture, TaskSequence, mixed


def make(name, size, reward=None):
  """A task whose right answer is its own name and the number of the question."""
  to_conversation = lambda number: {"messages": [{"role": "user", "content": str(number)}], "id": f"{name}{number}"}
  right = lambda conversation, completion: float(completion == conversation["id"])
  return Task(name, range(size), to_conversation, right, reward)


def ids(task):
  return [conversation["id"] for conversation in task]


def test_a_slice_is_a_view_with_the_bounds_of_python_and_can_be_sliced_again():
  task = make("a", 10)
  assert ids(task[2:9:3]) == ["a2", "a5", "a8"]
  assert ids(task[2:9:3][1:]) == ["a5", "a8"]
  assert ids(task[:100]) == ids(task)
  assert ids(task[-2:]) == ["a8", "a9"]
  assert ids(task.select([7, 0, 7])) == ["a7", "a0", "a7"]
  assert len(task) == 10


def test_a_slice_makes_no_conversation_and_copies_no_example():
  made = []
  task = Task("big", range(10**12), lambda number: made.append(number) or {"messages": [], "id": number})
  view = task[10**9 :: 10**6]
  assert not made
  assert view[5]["id"] == 10**9 + 5 * 10**6
  assert made == [10**9 + 5 * 10**6]


@pytest.mark.parametrize("index", [-1, 3, 10**9])
def test_an_index_outside_the_task_is_an_error_that_names_the_length(index):
  for task in (make("a", 3), make("a", 9)[::3], TaskMixture([make("a", 1), make("b", 2)])):
    with pytest.raises(IndexError, match=rf"example {index} of .* 3 examples"):
      task[index]
    with pytest.raises(IndexError, match=rf"example {index} of .* 3 examples"):
      task.select([0, index])


def test_an_index_error_within_an_example_does_not_end_the_iteration():
  task = Task("broken", range(3), lambda number: {"messages": [][number]})
  with pytest.raises(IndexError):
    list(task)


def test_a_sequence_is_one_task_after_the_other():
  tasks = [make("a", 2), make("none", 0), make("b", 2)[1:], make("a", 2)]
  assert ids(TaskSequence(tasks)) == ["a0", "a1", "b1", "a0", "a1"]
  assert [conversation["task_path"] for conversation in TaskSequence(tasks)] == [(0,), (0,), (2,), (3,), (3,)]


def test_a_mixture_has_every_example_once_for_each_time_that_its_task_is_given():
  a, b = make("a", 40), make("b", 20)
  mixture = TaskMixture([a, b, b], seed=3)
  assert sorted(ids(mixture)) == sorted(ids(a) + 2 * ids(b))
  assert ids(mixture) == ids(TaskMixture([a, b, b], seed=3))
  assert ids(mixture) != ids(TaskMixture([a, b, b], seed=4))
  assert ids(mixture)[:40] != ids(a)
  assert 10 < sum(id.startswith("a") for id in ids(mixture[:40])) < 36  # mixed, not one after the other
  assert ids(mixture[5:50:7]) == ids(mixture)[5:50:7]


def test_a_mixture_forwards_to_the_task_that_the_example_came_from():
  halved = lambda conversation, completion: 0.5 * (completion == conversation["id"])
  inner = TaskMixture([make("a", 3), make("b", 3, halved)], seed=1)
  outer = TaskMixture([make("c", 3), inner, Task("chat", [{"messages": [], "id": "d0"}], dict)], seed=2)
  for conversation in outer:
    id = conversation["id"]
    if id == "d0":
      with pytest.raises(ValueError, match="chat has no score"):
        outer.evaluate(conversation, "")
      continue
    assert outer.evaluate(conversation, id) == 1
    assert outer.evaluate(conversation, "other") == 0
    assert outer.reward(conversation, id) == (0.5 if id.startswith("b") else 1)
  assert {conversation["task_path"] for conversation in outer} == {(0,), (1, 0), (1, 1), (2,)}


def test_conversations_of_another_task_and_mixtures_of_nothing_are_errors():
  mixture = TaskMixture([make("a", 3)])
  for foreign in ({"messages": []}, {"messages": [], "task_path": (1,)}):
    with pytest.raises(ValueError, match="not from this mixture"):
      mixture.evaluate(foreign, "")
  with pytest.raises(ValueError, match="mixture has no tasks"):
    TaskMixture([])
  with pytest.raises(ValueError, match="chat has no score"):
    Task("chat", [{}], dict).reward({"messages": []}, "")


def test_a_share_of_an_endless_task_is_drawn_from_another():
  a, b = make("a", 2**31 - 1), make("b", 5)
  names = [row["id"] for row in mixed(a, b, 0.25, seed=1)[:400]]
  assert 60 < sum(name.startswith("b") for name in names) < 140
  assert {name for name in names if name.startswith("b")} == set(ids(b))
  assert all(name == f"a{i}" for i, name in enumerate(names) if name.startswith("a"))
  assert names == [row["id"] for row in mixed(a, b, 0.25, seed=1)[:400]]
  assert names != [row["id"] for row in mixed(a, b, 0.25, seed=2)[:400]]
