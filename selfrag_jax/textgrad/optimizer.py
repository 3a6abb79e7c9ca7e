"""Textual gradient descent: an engine rewrites texts by the critiques that they have received."""

import abc
import bisect
import collections
import dataclasses
import hashlib
import numbers
import time
from collections.abc import Mapping, Sequence
from typing import Any

from selfrag_jax.textgrad import prompts
from selfrag_jax.textgrad.accept import Accept, Verdict
from selfrag_jax.textgrad.checks import check_count, check_tags, check_text, check_texts
from selfrag_jax.textgrad.engine import EngineLM, MeteredEngine, Request, ask_all
from selfrag_jax.textgrad.gradient_rag import Past, RagConfig, fit, newest, recall
from selfrag_jax.textgrad.gradient_store import Critique, GradientStore
from selfrag_jax.textgrad.limits import Content, estimate_tokens
from selfrag_jax.textgrad.prompts import fill
from selfrag_jax.textgrad.replies import ReplyError, changed_share, limit_edit, parse_tags
from selfrag_jax.textgrad.resolve import resolve_engine
from selfrag_jax.textgrad.variable import Variable, check_variables

POLICIES = ("raise", "keep", "retry")
TAGS = ("<IMPROVED_VARIABLE>", "</IMPROVED_VARIABLE>")
LONGEST_NOTE = 400  # tokens of a note that asks again and says why; it quotes 300 characters


class NoGradientError(RuntimeError):
  """A parameter is to be improved, but it has received no critique."""


@dataclasses.dataclass
class Update:
  """The record of what a step changed in one parameter."""

  parameter: Variable
  before: str
  candidate: str
  verdict: Verdict
  past: Past
  stored: list[str]  # ids of this step's critiques


class Optimizer(abc.ABC):
  """The base of optimizers, which change variables by their gradients."""

  def __init__(self, parameters: Sequence[Variable]):
    """Take the texts to improve. Raises TypeError for images, ValueError for an empty list or a repeated variable."""
    self.parameters = check_variables(parameters, "parameters")
    if not self.parameters:
      raise ValueError("there are no parameters to improve; give variables, such as model.parameters()")
    for i, parameter in enumerate(self.parameters):
      if not isinstance(parameter.get_value(), str):
        raise TypeError(f"{parameter.role_description!r} is no text; only texts can be improved")
      if parameter in self.parameters[:i]:
        raise ValueError(f"{parameter.role_description!r} is there twice in the parameters")

  def zero_grad(self) -> None:
    """Forget the critiques of all parameters."""
    for parameter in self.parameters:
      parameter.reset_gradients()

  @abc.abstractmethod
  def step(self) -> Any:
    """Improve the parameters."""


class TextualGradientDescent(Optimizer):
  """An optimizer of texts by their critiques; with `use_gradient_rag`, by similar critiques of earlier steps too."""

  def __init__(
    self,
    parameters: Sequence[Variable],
    verbose: int = 0,
    engine: EngineLM | str | None = None,
    constraints: Sequence[str] | None = None,
    new_variable_tags: Sequence[str] | None = None,
    optimizer_system_prompt: str = prompts.OPTIMIZER_SYSTEM_PROMPT,
    in_context_examples: Sequence[str] | None = None,
    gradient_memory: int = 0,
    *,
    momentum_window: int = 0,
    learning_rate: float = 1.0,
    on_bad_reply: str = "raise",
    retries: int = 2,
    accept: Accept | None = None,
    use_gradient_rag: bool = False,
    gradient_store: GradientStore | None = None,
    rag: RagConfig | None = None,
    run: str = "",
  ):
    """Make an optimizer.

    Args:
      parameters: texts to improve; those of one step are accepted or rejected together.
      verbose: print every new text.
      engine: rewrites the texts; the backward engine by default.
      constraints: rules that every version must keep.
      new_variable_tags: the tags around the new version.
      optimizer_system_prompt: with {new_variable_start_tag} and {new_variable_end_tag} in it.
      in_context_examples: shown in every prompt.
      gradient_memory: how many earlier steps' critiques are shown again; where room is short, the last steps' are.
      momentum_window: how many earlier versions are shown, as far as there is room: a prompt stays within the engine's
        `context_tokens`, feedback with `use_gradient_rag` within `rag.tokens`.
      learning_rate: share of words that a step may change, in (0, 1]; a larger change is asked for again, then cut.
      on_bad_reply: `raise`, `keep` the text, or `retry` and then raise, when an answer holds no new version.
      retries: how often the engine is asked again, for a bad reply or too large a change.
      accept: decides whether candidates take the place of the texts, such as `HeldOut`; None takes all.
      use_gradient_rag: keep every critique in `gradient_store` and show those of similar cases, within `rag.tokens`.
      gradient_store: the store for `use_gradient_rag`; one in memory by default.
      rag: how much of the past is shown, and how it is chosen.
      run: name of the run in the store.

    Raises ValueError or TypeError for invalid settings.
    """
    super().__init__(parameters)
    _check_settings(learning_rate, on_bad_reply, accept, use_gradient_rag, gradient_store, rag)
    self.engine, self.verbose = resolve_engine(engine), verbose
    self.constraints = check_texts(constraints, "constraints")
    self.in_context_examples = check_texts(in_context_examples, "in_context_examples")
    self.new_variable_tags = check_tags(new_variable_tags, "new_variable_tags", TAGS)
    self._tags = dict(zip(("new_variable_start_tag", "new_variable_end_tag"), self.new_variable_tags, strict=True))
    check_text(optimizer_system_prompt, "optimizer_system_prompt")
    self.optimizer_system_prompt = fill(optimizer_system_prompt, **self._tags)
    self.gradient_memory = check_count(gradient_memory, "gradient_memory")
    self.momentum_window = check_count(momentum_window, "momentum_window")
    self.learning_rate, self.accept = float(learning_rate), accept
    self._policy, self._retries = on_bad_reply, check_count(retries, "retries")
    self._memory = {p: collections.deque(maxlen=gradient_memory) for p in self.parameters}
    self._versions = {p: collections.deque(maxlen=momentum_window) for p in self.parameters}
    self.rag = (rag or RagConfig()) if use_gradient_rag else None
    self.store = (GradientStore() if gradient_store is None else gradient_store) if use_gradient_rag else None
    self.run, self.step_count, self.epoch = run, 0, 0
    self.overhead_seconds = 0.0  # spent on the store: embedding, search, merging and storing

  @property
  def constraint_text(self) -> str:
    """The constraints, numbered."""
    return "\n".join(f"Constraint {i}: {text}" for i, text in enumerate(self.constraints, 1))

  def step(self) -> list[Update]:
    """Improve every parameter: the critiques are stored first, and the texts change when all answers have arrived.

    Raises NoGradientError for a parameter without gradients, ReplyError by the policy, and any error of the engine,
    whatever the policy: then texts and critiques are unchanged, and the store has the critiques.
    """
    for parameter in self.parameters:
      if not parameter.gradients:
        why = "call backward() before step()" if parameter.requires_grad else "it has requires_grad=False"
        raise NoGradientError(f"nothing was said about {parameter.role_description!r}; {why}")
    plans = [self._plan(parameter) for parameter in self.parameters]
    candidates = self._propose([content for content, _, _ in plans])
    olds = [p.get_value() for p in self.parameters]
    verdict = Verdict(True) if self.accept is None or candidates == olds else self.accept(self.parameters, candidates)
    updates = []
    for parameter, old, new, (_, past, stored) in zip(self.parameters, olds, candidates, plans, strict=True):
      updates.append(Update(parameter, old, new, verdict, past, stored))
      self._memory[parameter].append(parameter.get_gradient_text())
      self._versions[parameter].append(old)
      if verdict.accepted:
        parameter.set_value(new)
      if self.verbose:
        print(f"step {self.step_count}, {parameter.role_description}:\n{parameter.get_value()}\n", flush=True)
    self._note_outcome(updates)
    self.step_count += 1
    return updates

  def state(self) -> dict[str, list[list[str]]]:
    """Return the critiques and versions of earlier steps that the next steps show, without the store, for a file."""
    kept = {"memory": self._memory, "versions": self._versions}
    return {name: [list(of[p]) for p in self.parameters] for name, of in kept.items()}

  def restore(self, state: Mapping[str, Sequence[Sequence[str]]]) -> None:
    """Go on from `state()`."""
    for name, of in {"memory": self._memory, "versions": self._versions}.items():
      for parameter, texts in zip(self.parameters, state[name], strict=True):
        of[parameter].clear()
        of[parameter].extend(texts)

  def _plan(self, parameter: Variable) -> tuple[Content, Past, list[str]]:
    """Return a parameter's prompt, the past critiques in it, and the ids under which its critiques were stored."""
    parts = [_shown(g, parameter.gradients_context.get(g)) for g in parameter.gradients]
    if self.rag is None or self.store is None:
      return self._fitting_prompt(parameter, parts, [], self._memory_lines(parameter)), Past([], []), []
    began = time.perf_counter()
    critiques = self._critiques(parameter)
    rows = self.store.embed(critiques)
    for gradient, row in zip(_singles(parameter), rows, strict=True):
      gradient.embedding = row
    parts = fit(parts, self.rag.tokens, self.rag.count_tokens)
    left = self.rag.tokens - sum(map(self.rag.count_tokens, parts))
    past = recall(self.store, rows, parameter.role_description, self.rag, min(left, self.rag.past_tokens))
    left -= sum(map(self.rag.count_tokens, past.lines))
    memory = newest(self._memory_lines(parameter), left, self.rag.count_tokens)
    stored = self.store.add(critiques, rows)
    self.overhead_seconds += time.perf_counter() - began
    return self._fitting_prompt(parameter, parts, past.lines, memory), past, stored

  def _critiques(self, parameter: Variable) -> list[Critique]:
    known = ("sample", "output", "target")
    value_hash = hashlib.sha256(parameter.get_value().encode()).hexdigest()[:16]
    return [
      Critique(
        role=parameter.role_description,
        text=gradient.get_value(),
        score=gradient.loss_context.get("score"),
        run=self.run,
        step=self.step_count,
        epoch=self.epoch,
        tokens=estimate_tokens(gradient.get_value()),
        value_hash=value_hash,
        **{name: str(gradient.loss_context.get(name, "")) for name in known},
      )
      for gradient in _singles(parameter)
    ]

  def _memory_lines(self, parameter: Variable) -> list[str]:
    return [f"<FEEDBACK-{i}> {text} </FEEDBACK-{i}>" for i, text in enumerate(self._memory[parameter], 1)]

  def _fitting_prompt(
    self, parameter: Variable, parts: Sequence[list[Any]], past: Sequence[str], memory: Sequence[str]
  ) -> Content:
    """Return the prompt with as many of the last steps as the engine's context has room for."""
    versions = [f"\nVersion {i}: {text}" for i, text in enumerate(self._versions[parameter], 1)]

    def prompt(steps: int) -> Content:
      return self._prompt(parameter, parts, past, _last(memory, steps), _last(versions, steps))

    most = max(len(memory), len(versions))
    if most and not self._fits(prompt(most)):
      most = bisect.bisect(range(1, most), False, key=lambda steps: not self._fits(prompt(steps)))
    return prompt(most)

  def _fits(self, content: Content) -> bool:
    """Tell whether the engine's context holds a prompt, the longest answer, and a note that asks again."""
    if not isinstance(self.engine, MeteredEngine) or self.engine.context_tokens is None:
      return True
    sampling = self.engine.sampling
    longest = sampling.get("max_completion_tokens") or sampling.get("max_tokens") or 0
    if self._retries and (self._policy == "retry" or self.learning_rate < 1):
      longest += LONGEST_NOTE
    texts = content, self.optimizer_system_prompt
    return sum(map(self.engine.count_tokens, texts)) + longest <= self.engine.context_tokens

  def _prompt(
    self,
    parameter: Variable,
    parts: Sequence[list[Any]],
    past: Sequence[str],
    memory: Sequence[str],
    versions: Sequence[str],
  ) -> Content:
    fields = {"variable_desc": parameter.role_description, "variable_value": parameter.get_value(), **self._tags}
    records = {
      prompts.PAST_FEEDBACK: past,
      prompts.GRADIENT_MEMORY: memory,
      prompts.MOMENTUM: versions,
      prompts.CONSTRAINTS: self.constraints and [self.constraint_text],
      prompts.EXAMPLES: self.in_context_examples,
    }
    after = [fill(prompts.UPDATE_END, **fields)]
    after += [fill(template, records="\n".join(lines)) for template, lines in records.items() if lines]
    if self.learning_rate < 1:
      after.append(fill(prompts.EDIT_BUDGET, percent=f"{self.learning_rate:.0%}"))
    after.append(fill(prompts.UPDATE_FORMAT, **self._tags))
    pieces: list[str | bytes] = [fill(prompts.UPDATE_START, **fields)]
    for i, part in enumerate(parts):
      pieces += (["\n\n"] if i else []) + part
    pieces.append("\n\n".join(after))
    if all(isinstance(piece, str) for piece in pieces):
      return "".join(pieces)  # type: ignore[arg-type]
    return pieces

  def _propose(self, contents: Sequence[Content]) -> list[str]:
    """Ask for new versions; where an answer cannot be used, ask again and give the reason."""
    found: dict[int, str] = {}
    notes, attempts = dict.fromkeys(range(len(contents)), ""), 0
    while len(found) < len(contents):
      waiting = [i for i in range(len(contents)) if i not in found]
      requests = [Request(_with_note(contents[i], notes[i]), self.optimizer_system_prompt) for i in waiting]
      is_last = attempts >= self._retries
      for i, reply in zip(waiting, ask_all(self.engine, requests), strict=True):
        old = self.parameters[i].get_value()
        try:
          new = parse_tags(reply, self.new_variable_tags)
        except ReplyError as error:
          if self._policy == "keep":
            found[i] = old
          elif self._policy == "raise" or is_last:
            raise
          notes[i] = f"Your last answer could not be used: {error}"
          continue
        share = changed_share(old, new) if self.learning_rate < 1 else 0.0
        if share > self.learning_rate and not is_last:
          notes[i] = fill(prompts.TOO_LARGE_AN_EDIT, changed=f"{share:.0%}")
          continue
        found[i] = new if share <= self.learning_rate else limit_edit(old, new, self.learning_rate)
      attempts += 1
    return [found[i] for i in range(len(contents))]

  def _note_outcome(self, updates: Sequence[Update]) -> None:
    if self.store is None or self.accept is None:
      return
    began = time.perf_counter()
    for update in updates:
      if update.candidate == update.before:  # no change was tried, so the critiques have no outcome
        continue
      self.store.note_outcome(update.stored, update.verdict.accepted, update.verdict.delta)
      delta = update.verdict.delta
      self.store.note_use(update.past.ids, update.verdict.accepted and (delta is None or delta > 0))
    self.overhead_seconds += time.perf_counter() - began


TGD = TextualGradientDescent


class TextualGradientDescentwithMomentum(TextualGradientDescent):
  """`TextualGradientDescent` with the order of arguments of TextGrad's optimizer with momentum."""

  def __init__(
    self,
    engine: EngineLM | str | None,
    parameters: Sequence[Variable],
    momentum_window: int = 0,
    constraints: Sequence[str] | None = None,
    new_variable_tags: Sequence[str] | None = None,
    in_context_examples: Sequence[str] | None = None,
    optimizer_system_prompt: str = prompts.OPTIMIZER_SYSTEM_PROMPT,
    **options: Any,
  ):
    """Make an optimizer; `options` are the other arguments of `TextualGradientDescent`."""
    super().__init__(
      parameters,
      engine=engine,
      constraints=constraints,
      new_variable_tags=new_variable_tags,
      optimizer_system_prompt=optimizer_system_prompt,
      in_context_examples=in_context_examples,
      momentum_window=momentum_window,
      **options,
    )


def _check_settings(
  learning_rate: float, on_bad_reply: str, accept: object, use_gradient_rag: bool, gradient_store: object, rag: object
) -> None:
  if isinstance(learning_rate, bool) or not isinstance(learning_rate, numbers.Real):
    raise TypeError(f"learning_rate must be a number, not {type(learning_rate).__name__}")
  if not 0 < learning_rate <= 1:
    raise ValueError(f"learning_rate = {learning_rate} is a share of the words: above 0, at most 1")
  if on_bad_reply not in POLICIES:
    raise ValueError(f"unknown on_bad_reply {on_bad_reply!r}; use one of {', '.join(POLICIES)}")
  kinds = {"gradient_store": (gradient_store, GradientStore), "rag": (rag, RagConfig)}
  for name, (given, kind) in kinds.items():
    if given is not None and not isinstance(given, kind):
      raise TypeError(f"{name} must be a {kind.__name__}, not {type(given).__name__}")
  if accept is not None and not callable(accept):
    raise TypeError(f"accept must be a function such as HeldOut(score), not {type(accept).__name__}")
  if not use_gradient_rag and (gradient_store is not None or rag is not None):
    raise ValueError("gradient_store and rag are for use_gradient_rag=True")


def _last(items: Sequence[str], n: int) -> Sequence[str]:
  return items[max(0, len(items) - n) :]


def _singles(parameter: Variable) -> list[Variable]:
  """Return the critiques of a parameter, with the parts of a combined critique in its place."""
  singles, stack = [], list(parameter.gradients)[::-1]
  while stack:
    gradient = stack.pop()
    stack += gradient.parts[::-1]
    if not gradient.parts:
      singles.append(gradient)
  return singles


def _shown(gradient: Variable, context: dict[str, Any] | None) -> list[Any]:
  """Return a critique with the conversation that it is about, as a list of texts and images."""
  if context is None:
    return [f"<FEEDBACK> {gradient.get_value()} </FEEDBACK>"]
  fields = {"response_desc": context["response_desc"], "variable_desc": context["variable_desc"]}
  feedback = gradient.get_value()
  if isinstance(context["context"], list):
    return [*context["context"], fill(prompts.GRADIENT_AFTER_PARTS, feedback=feedback, **fields)]
  return [fill(prompts.GRADIENT, context=context["context"], feedback=feedback, **fields)]


def _with_note(content: Content, note: str) -> Content:
  if not note:
    return content
  return f"{content}\n\n{note}" if isinstance(content, str) else [*content, note]
