"""Variables: texts in a graph of calls, whose `backward` gives critiques to the texts that they were made from."""

import base64
import dataclasses
import functools
import json
import math
import numbers
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, MutableSet, Sequence
from typing import Any

import numpy as np

from selfrag_jax.textgrad.checks import check_list, check_text
from selfrag_jax.textgrad.engine import Request, ask_all
from selfrag_jax.textgrad.graph import draw
from selfrag_jax.textgrad.images import read_image
from selfrag_jax.textgrad.prompts import REDUCE_SYSTEM_PROMPT, reduce_prompt, shorten
from selfrag_jax.textgrad.resolve import resolve_engine

TOGETHER = "Feedback on this text together with others: "
LONGEST_ROLE = 200  # words; the roles of nested sums would grow without end
FORMAT = 1  # of the JSON


class GraphError(ValueError):
  """The graph of variables has a cycle, so it is no graph of calls."""


class OrderedSet(MutableSet):
  """A set in the order of insertion, so that prompts are the same in every run."""

  def __init__(self, items: Iterable[Any] = ()):
    self._items = dict.fromkeys(items)

  def add(self, value: Any) -> None:
    """Add an item at the end, unless it is there."""
    self._items[value] = None

  def discard(self, value: Any) -> None:
    """Remove an item, if it is there."""
    self._items.pop(value, None)

  def __contains__(self, value: object) -> bool:
    return value in self._items

  def __iter__(self) -> Iterator[Any]:
    return iter(self._items)

  def __len__(self) -> int:
    return len(self._items)

  def __repr__(self) -> str:
    return f"{{{', '.join(map(repr, self._items))}}}"


@dataclasses.dataclass(frozen=True)
class Message:
  """A critique for a variable: a `text` that is passed on, or a `request` to the backward engine for one."""

  variable: "Variable"
  request: Request | None = None
  text: str = ""
  context: dict[str, Any] | None = None  # the optimizer is shown its context, response_desc and variable_desc
  loss_context: dict[str, Any] = dataclasses.field(default_factory=dict)
  groups: tuple[int, ...] = ()


class Variable:
  """A text (or an image, as bytes), its role, and the critiques that it has received.

  `gradients` are variables too, in the order of their arrival. Each has a `loss_context` (the criticised sample and
  output, with target and score from the loss), and the `embedding` that the gradient store gave it.
  """

  def __init__(
    self,
    value: str | bytes | int = "",
    image_path: str | os.PathLike[str] = "",
    predecessors: Sequence["Variable"] | None = None,
    requires_grad: bool = True,
    *,
    role_description: str,
  ):
    """Make a variable.

    Args:
      value: text; integers become text; bytes are an image.
      image_path: file or http(s) address of an image, in place of a value.
      predecessors: variables that it was made from.
      requires_grad: whether it receives critiques.
      role_description: its purpose; critics and optimizer read it.

    Raises ValueError for contradictory arguments or text that UTF-8 cannot hold, TypeError for another value.
    """
    predecessors = check_variables(predecessors, "predecessors")
    self.set_role_description(role_description)
    if not requires_grad and (needy := [v.role_description for v in predecessors if v.requires_grad]):
      raise ValueError(f"{role_description!r} requires no gradient, but is made from variables that do: {needy}")
    path = check_text(os.fspath(image_path), "image_path")
    if value != "" and path:
      raise ValueError("give a value or an image_path, not both")
    self.requires_grad = requires_grad
    self.set_value(read_image(path) if path else value)
    self.predecessors: OrderedSet = OrderedSet(predecessors)
    self.gradients: MutableSet = OrderedSet()
    self.gradients_context: dict[Variable, dict[str, Any] | None] = {}
    self.grad_fn: Callable[..., Iterable[Message] | None] | None = None
    self.embedding: np.ndarray | None = None
    self.loss_context: dict[str, Any] = {}
    self.parts: tuple[Variable, ...] = ()  # the critiques that this one combines
    self._groups: tuple[int, ...] = ()  # the `aggregate` calls that a critique, or this sum, belongs to
    self._passed: tuple[int, ...] = ()  # the `aggregate` calls that this backward pass came through

  def __repr__(self) -> str:
    return f"Variable(value={self.value!r}, role={self.role_description!r}, grads={len(self.gradients)})"

  def __str__(self) -> str:
    return str(self.value)

  def __add__(self, other: Any) -> "Variable":
    if not isinstance(other, Variable):
      return NotImplemented
    return join([self, other], "", prefix="", joint=" and ")

  def get_value(self) -> Any:
    """Return the text."""
    return self.value

  def set_value(self, value: Any) -> None:
    """Replace the text, or the image. Raises TypeError or ValueError for another value."""
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
      value = str(int(value))
    if isinstance(value, bytes):
      if self.requires_grad:
        raise ValueError("images receive no gradients; give requires_grad=False")
    elif isinstance(value, str):
      check_text(value, f"the value of {self.role_description!r}")
    else:  # floats too: the caller must choose the digits
      raise TypeError(f"the value must be text, an integer or bytes (an image), not {type(value).__name__}")
    self.value: Any = value

  def get_role_description(self) -> str:
    """Return the role."""
    return self.role_description

  def set_role_description(self, role_description: str) -> None:
    """Set the role. Raises TypeError or ValueError if it is no text."""
    self.role_description = check_text(role_description, "role_description")

  def get_short_value(self, n_words_offset: int = 10) -> str:
    """Return the first and last words of a long text."""
    return shorten(self.value, n_words_offset)

  def get_grad_fn(self) -> Callable[..., Any] | None:
    """Return the function that gives critiques to the predecessors."""
    return self.grad_fn

  def set_grad_fn(self, grad_fn: Callable[..., Any] | None) -> None:
    """Set the function that gives critiques to the predecessors.

    It is called with `backward_engine=`. It returns messages, whose requests are sent together with those of other
    variables; or it adds to the predecessors' gradients itself and returns None.
    """
    self.grad_fn = grad_fn

  def get_gradient_text(self) -> str:
    """Return all critiques, one after the other."""
    return "\n".join(gradient.value for gradient in self.gradients)

  def reset_gradients(self) -> None:
    """Forget the critiques."""
    self.gradients, self.gradients_context = OrderedSet(), {}

  def receive(self, message: Message, text: str) -> None:
    """Add a critique to the gradients; an empty text means that there is nothing to criticise."""
    self._passed = tuple(dict.fromkeys((*self._passed, *message.groups)))
    if not text.strip():
      return
    gradient = Variable(text, role_description=f"feedback to {self.role_description}")
    gradient.loss_context, gradient._groups = dict(message.loss_context), message.groups
    self.gradients.add(gradient)
    self.gradients_context[gradient] = message.context

  def groups(self) -> tuple[int, ...]:
    """Return the `aggregate` calls that critiques of this variable belong to."""
    return tuple(dict.fromkeys((*self._passed, *self._groups)))

  def context_of_loss(self) -> dict[str, Any]:
    """Return the loss context of the critiques and, overriding it, of this variable."""
    return {name: x for v in (*self.gradients, self) for name, x in v.loss_context.items()}

  def backward(self, engine: Any = None) -> None:
    """Give critiques to every variable that this one was made from and that requires them.

    Independent calls are made at once, up to the engine's `concurrency`; the order of the critiques does not depend on
    how long each takes. Without `engine`, the engine of `set_backward_engine` is used.
    Raises ValueError if there is no engine, GraphError for a cycle, and any error of the engine: critiques that arrived
    before the error are kept, and no text has changed.
    """
    engine = resolve_engine(engine)
    self.gradients, graph = OrderedSet(), levels(self)
    for v in (v for level in graph for v in level):
      v._passed = ()
    for level in graph:
      needy = [v for v in level if v.requires_grad]
      _reduce(needy, engine)
      messages = [m for v in needy if v.grad_fn is not None for m in v.grad_fn(backward_engine=engine) or ()]
      messages = [message for message in messages if message.variable.requires_grad]
      answers = ask_all(engine, [message.request for message in messages if message.request is not None])
      for message in messages:
        message.variable.receive(message, message.text if message.request is None else next(answers))

  def generate_graph(self, print_gradients: bool = False) -> Any:
    """Return the graph of this variable's predecessors as a `graphviz.Digraph`; needs the package graphviz."""
    return draw([v for level in levels(self) for v in level], print_gradients)

  def save(self, path: str) -> None:
    """Write this variable and all variables that it was made from, critiques included, as JSON.

    Backward functions are code and are not written.
    """
    from selfrag_jax.storage.atomic import write_json

    nodes = [v for level in reversed(levels(self)) for v in level]
    known = set(nodes)
    for v in nodes:  # the list grows by critiques and their parts
      for other in (*v.gradients, *v.parts):
        if other not in known:
          known.add(other)
          nodes.append(other)
    place = {v: i for i, v in enumerate(nodes)}
    write_json(path, {"format": FORMAT, "root": place[self], "variables": [_plain(v, place) for v in nodes]})

  @classmethod
  def load(cls, path: str) -> "Variable":
    """Read what `save` wrote. Raises ValueError for another file."""
    try:
      content = json.loads(pathlib.Path(path).read_text("utf-8"))
      if content["format"] != FORMAT:
        raise ValueError(f"format {content['format']}, this version reads {FORMAT}")
      nodes = [_variable(entry) for entry in content["variables"]]
      for v, entry in zip(nodes, content["variables"], strict=True):
        v.predecessors = OrderedSet(nodes[i] for i in entry["predecessors"])
        v.gradients = OrderedSet(nodes[i] for i, _ in entry["gradients"])
        v.gradients_context = {nodes[i]: _unjson(context) for i, context in entry["gradients"]}
        v.parts = tuple(nodes[i] for i in entry["parts"])
      return nodes[content["root"]]
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
      raise ValueError(f"{path} holds no variables that Variable.save wrote: {error}") from None


def join(
  variables: Sequence[Variable], separator: str, prefix: str = "a combination of the following: ", joint: str = ", "
) -> Variable:
  """Join texts; backward, each text receives the critiques of the whole. The role of the whole joins their roles.

  Raises ValueError for no variables or images, TypeError for other values.
  """
  variables = check_variables(variables, "variables")
  if not variables:
    raise ValueError("there are no variables to join")
  if images := [v.role_description for v in variables if not isinstance(v.value, str)]:
    raise ValueError(f"only texts can be joined, not images: {images}")
  roles = joint.join(dict.fromkeys(v.get_role_description() for v in variables))
  total = Variable(
    separator.join(v.get_value() for v in variables),
    predecessors=variables,
    role_description=prefix + shorten(roles, LONGEST_ROLE // 2),
    requires_grad=any(v.requires_grad for v in variables),
  )
  total.grad_fn = functools.partial(_join_backward, total)
  return total


def check_variables(values: Any, name: str) -> list[Variable]:
  """Return a list of variables; None is an empty one. Raises TypeError for anything else."""
  if isinstance(values, Variable):
    raise TypeError(f"{name} must be a list of variables, not one Variable; write [...] around it")
  return [check_variable(v, f"{name}[{i}]") for i, v in enumerate(check_list(values, name, "variables"))]


def check_variable(value: Any, name: str) -> Variable:
  """Return a variable. Raises TypeError for anything else."""
  if not isinstance(value, Variable):
    how = "Variable(text, requires_grad=False, role_description=...) makes one"
    raise TypeError(f"{name} must be a Variable, not {type(value).__name__}; {how}")
  return value


def _join_backward(total: Variable, backward_engine: Any) -> list[Message]:
  """Pass the critiques of the whole to its parts, with one prefix through any number of sums."""
  feedback, groups, shared = total.get_gradient_text(), total.groups(), total.context_of_loss()
  text = feedback if not feedback or feedback.startswith(TOGETHER) else TOGETHER + feedback
  return [Message(v, text=text, loss_context=shared, groups=groups) for v in total.predecessors]


def levels(root: Variable) -> list[list[Variable]]:
  """Return `root` and all its predecessors in levels, each variable in a level after all variables made from it.

  Variables of one level do not depend on each other. No recursion: graphs may be deep. Raises GraphError for a cycle.
  """
  order, state, stack = [], {root: "open"}, [(root, _backwards(root))]
  while stack:
    v, rest = stack[-1]
    for predecessor in rest:
      if state.get(predecessor) == "open":
        raise GraphError(f"{predecessor.role_description!r} is its own predecessor; build it from new variables")
      if predecessor not in state:
        state[predecessor] = "open"
        stack.append((predecessor, _backwards(predecessor)))
        break
    else:
      state[v] = "done"
      order.append(v)
      stack.pop()
  depth = dict.fromkeys(reversed(order), 0)
  for v in depth:
    for predecessor in v.predecessors:
      depth[predecessor] = max(depth[predecessor], depth[v] + 1)
  found: list[list[Variable]] = [[] for _ in range(max(depth.values()) + 1)]
  for v, d in depth.items():
    found[d].append(v)
  return found


def _backwards(v: Variable) -> Iterator[Variable]:
  return reversed(list(v.predecessors))  # `levels` reverses the order in the end


def _reduce(variables: Iterable[Variable], engine: Any) -> None:
  """Combine each variable's critiques of one `aggregate` call into one critique; all requests are sent at once."""
  found = []
  for v in variables:
    groups: dict[tuple[int, ...], list[Variable]] = {}
    for gradient in v.gradients:
      if gradient._groups:
        groups.setdefault(gradient._groups, []).append(gradient)
    found += [(v, several) for several in groups.values() if len(several) > 1]
  answers = ask_all(engine, [Request(reduce_prompt([g.value for g in gs]), REDUCE_SYSTEM_PROMPT) for _, gs in found])
  for (v, several), text in zip(found, answers, strict=True):
    roles = dict.fromkeys(gradient.role_description for gradient in several)
    combined = Variable(text, role_description=", ".join(roles))
    combined.parts, combined._groups = tuple(several), several[0]._groups
    gone = set(several)
    v.gradients = OrderedSet([*(gradient for gradient in v.gradients if gradient not in gone), combined])


def _plain(v: Variable, place: dict[Variable, int]) -> dict[str, Any]:
  return {
    "value": _json(v.value),
    "role_description": v.role_description,
    "requires_grad": v.requires_grad,
    "predecessors": [place[p] for p in v.predecessors],
    "gradients": [[place[g], _json(v.gradients_context.get(g))] for g in v.gradients],
    "parts": [place[p] for p in v.parts],
    "embedding": None if v.embedding is None else np.asarray(v.embedding, np.float64).tolist(),
    "loss_context": _json(v.loss_context),
  }


def _variable(entry: dict[str, Any]) -> Variable:
  v = Variable(
    _unjson(entry["value"]), requires_grad=entry["requires_grad"], role_description=entry["role_description"]
  )
  v.embedding = None if entry["embedding"] is None else np.array(entry["embedding"], np.float32)
  v.loss_context = _unjson(dict(entry["loss_context"]))
  return v


def _json(value: Any) -> Any:
  """Return a value or a context as JSON: images as base64, numbers of numpy and JAX as Python's, NaN as null."""
  if isinstance(value, bytes):
    return {"image": base64.b64encode(value).decode()}
  if callable(getattr(value, "item", None)):  # a number of numpy or JAX
    value = value.item()
  if isinstance(value, float) and not math.isfinite(value):
    return None
  if isinstance(value, dict):
    return {name: _json(x) for name, x in value.items()}
  return [_json(x) for x in value] if isinstance(value, list) else value


def _unjson(value: Any) -> Any:
  if isinstance(value, dict):
    is_image = list(value) == ["image"]
    return base64.b64decode(value["image"]) if is_image else {name: _unjson(x) for name, x in value.items()}
  return [_unjson(x) for x in value] if isinstance(value, list) else value
