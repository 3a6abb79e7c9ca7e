"""Calls of language models and functions that remember how to bring critiques back to what they were given."""

import abc
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from selfrag_jax.textgrad.engine import EngineLM, Request
from selfrag_jax.textgrad.limits import Content
from selfrag_jax.textgrad.prompts import (
  BACKWARD_SYSTEM_PROMPT,
  FUNCTION_CONVERSATION,
  LLM_CONVERSATION,
  backward_prompt,
  fill,
  fill_format,
)
from selfrag_jax.textgrad.resolve import resolve_engine
from selfrag_jax.textgrad.variable import Message, Variable, join

OUTPUT_ROLE = "response from the language model"
_groups = itertools.count()


class Function(abc.ABC):
  """Something that makes a variable from variables."""

  @abc.abstractmethod
  def forward(self, *args: Any, **kwargs: Any) -> Variable:
    """Make it."""

  def __call__(self, *args: Any, **kwargs: Any) -> Variable:
    """Make it."""
    return self.forward(*args, **kwargs)


class Module(Function):
  """A function with variables of its own."""

  def parameters(self) -> list[Variable]:
    """Return what an optimizer may change."""
    return []

  def zero_grad(self) -> None:
    """Forget the critiques of all of them."""
    for parameter in self.parameters():
      parameter.reset_gradients()


class LLMCall(Function):
  """Ask a language model; backward, the input and the system prompt are criticised in the light of the answer."""

  def __init__(self, engine: EngineLM | str | None, system_prompt: Variable | None = None):
    """Make the call of an engine, its name, or None for the backward engine."""
    self.engine, self.system_prompt = resolve_engine(engine), system_prompt

  def forward(self, input_variable: Variable, response_role_description: str = OUTPUT_ROLE) -> Variable:
    """Ask the engine the input's value."""
    return self._ask(input_variable.get_value(), [input_variable], response_role_description)

  def _ask(self, content: Content, inputs: Sequence[Variable], role: str) -> Variable:
    system = None if self.system_prompt is None else self.system_prompt.get_value()
    text = self.engine(content, system_prompt=system)
    sources = [*([] if self.system_prompt is None else [self.system_prompt]), *inputs]
    response = Variable(
      text, predecessors=sources, role_description=role, requires_grad=any(v.requires_grad for v in sources)
    )
    response.grad_fn = functools.partial(_llm_backward, response, content, system)
    return response


class FormattedLLMCall(LLMCall):
  """Ask a language model a text with several variables in it, such as "Question: {question}"."""

  def __init__(
    self,
    engine: EngineLM | str | None,
    format_string: str,
    fields: Mapping[str, Any],
    system_prompt: Variable | None = None,
  ):
    """Make the call; the names of `fields` are those in the format string."""
    super().__init__(engine, system_prompt)
    self.format_string, self.fields = format_string, dict(fields)

  def forward(self, inputs: Mapping[str, Variable], response_role_description: str = OUTPUT_ROLE) -> Variable:
    """Ask the engine. Raises ValueError when the inputs are not those of the format string."""
    if set(inputs) != set(self.fields):
      raise ValueError(f"the call has the fields {list(self.fields)}, the inputs are {list(inputs)}")
    content = fill_format(self.format_string, {name: str(v.get_value()) for name, v in inputs.items()})
    return self._ask(content, list(inputs.values()), response_role_description)


class MultimodalLLMCall(LLMCall):
  """Ask a language model a list of texts and images."""

  def forward(self, input_content: Sequence[Variable], response_role_description: str = OUTPUT_ROLE) -> Variable:
    """Ask the engine the values in their order."""
    for v in input_content:
      if not isinstance(v, Variable):
        raise TypeError(f"the input is a list of variables, not {type(v).__name__}")
    return self._ask([v.get_value() for v in input_content], list(input_content), response_role_description)


class OrderedFieldsMultimodalLLMCall(MultimodalLLMCall):
  """Ask a language model texts and images, each text under the name of its field."""

  def __init__(self, engine: EngineLM | str | None, fields: Sequence[str], system_prompt: Variable | None = None):
    """Make the call; the inputs are put in the order of `fields`."""
    super().__init__(engine, system_prompt)
    self.fields = list(fields)

  def forward(self, inputs: Mapping[str, Variable], response_role_description: str = OUTPUT_ROLE) -> Variable:
    """Ask the engine. Raises ValueError when the inputs are not the fields."""
    if set(inputs) != set(self.fields):
      raise ValueError(f"the call has the fields {self.fields}, the inputs are {list(inputs)}")
    values = [(name, inputs[name].get_value()) for name in self.fields]
    content = [value if isinstance(value, bytes) else f"**{name}**: {value}" for name, value in values]
    return self._ask(content, [inputs[name] for name in self.fields], response_role_description)


class StringBasedFunction(Function):
  """A function of texts, such as a unit test; backward, its inputs are criticised in the light of what it returned."""

  def __init__(self, fn: Callable[..., str], function_purpose: str):
    """Make a function; it is called with variables by name, `function_purpose` tells critics what it does."""
    self.fn, self.function_purpose = fn, function_purpose

  def forward(self, inputs: Mapping[str, Variable], response_role_description: str | None = None) -> Variable:
    """Call the function."""
    role = response_role_description or f"output of the function with the purpose: {self.function_purpose}"
    response = Variable(
      self.fn(**inputs),
      predecessors=list(inputs.values()),
      role_description=role,
      requires_grad=any(v.requires_grad for v in inputs.values()),
    )
    response.grad_fn = functools.partial(_function_backward, response, dict(inputs), self.function_purpose)
    return response


class BlackboxLLM(Module):
  """A language model with a system prompt that can be learned."""

  def __init__(self, engine: EngineLM | str | None = None, system_prompt: Variable | str | None = None):
    """Make the model; a system prompt given as text is not learned."""
    if isinstance(system_prompt, str):
      role = "system prompt for the language model"
      system_prompt = Variable(system_prompt, requires_grad=False, role_description=role)
    self.engine, self.system_prompt = resolve_engine(engine), system_prompt
    self.llm_call = LLMCall(self.engine, system_prompt)

  def parameters(self) -> list[Variable]:
    """Return the system prompt, if there is one."""
    return [] if self.system_prompt is None else [self.system_prompt]

  def forward(self, x: Variable) -> Variable:
    """Ask the model."""
    return self.llm_call(x)


def sum(variables: Sequence[Variable]) -> Variable:  # TextGrad's name, after torch.sum
  """Join variables line by line; backward, each receives what the whole has received."""
  return join(variables, "\n")


def aggregate(variables: Sequence[Variable]) -> Variable:
  """Join variables line by line; critiques that come from it and meet in one variable become one, by the engine."""
  total = join(variables, "\n")
  total._groups = (next(_groups),)
  return total


def _llm_backward(response: Variable, content: Content, system: str | None, backward_engine: EngineLM) -> list[Message]:
  """Ask for critiques of what a language model was given. Images come before the question, as they were shown."""
  images = isinstance(content, list)
  prompt = " ".join("(image above)" if isinstance(p, bytes) else p for p in content) if images else content
  seen = [part for part in content if isinstance(part, bytes)] if images else []
  fields = {"system_prompt": system or "", "prompt": prompt, "response_value": response.get_value()}
  conversation = fill(LLM_CONVERSATION, **fields)
  return _ask_critiques("llm", response, conversation, seen, prompt)


def _function_backward(
  response: Variable, inputs: Mapping[str, Variable], purpose: str, backward_engine: EngineLM
) -> list[Message]:
  """Ask for critiques of a function's inputs."""
  shown = {name: f"**{name}** ({v.get_role_description()}): {v.get_value()}" for name, v in inputs.items()}
  fields = {"function_purpose": purpose, "inputs": "\n\n".join(shown.values()), "response_value": response.get_value()}
  # what is improved, such as a program, is the same in all samples
  sample = [shown[name] for name, v in inputs.items() if not v.requires_grad] or shown.values()
  return _ask_critiques("function", response, fill(FUNCTION_CONVERSATION, **fields), [], "\n\n".join(sample))


def _ask_critiques(kind: str, response: Variable, conversation: str, images: list[bytes], sample: str) -> list[Message]:
  messages, feedback, groups = [], response.get_gradient_text(), response.groups()
  own = {"sample": sample, "output": response.get_value()}
  loss_context = {**response.context_of_loss(), **own, **response.loss_context}
  for v in response.predecessors:
    if not v.requires_grad:
      continue
    fields = {
      "variable_desc": v.get_role_description(),
      "variable_short": v.get_short_value(),
      "response_desc": response.get_role_description(),
      "response_gradient": feedback,
    }
    text = backward_prompt(kind, conversation, fields)
    context = {
      "context": [*images, conversation] if images else conversation,
      "response_desc": response.get_role_description(),
      "variable_desc": v.get_role_description(),
    }
    content = [*images, text] if images else text
    request = Request(content, BACKWARD_SYSTEM_PROMPT)
    messages.append(Message(v, request, context=context, loss_context=loss_context, groups=groups))
  return messages
