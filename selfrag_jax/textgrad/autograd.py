"""Operations on variables: calls of language models and of functions, whose backward functions criticise their inputs.

The module has TextGrad's name.
"""

import abc
import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from selfrag_jax.textgrad.checks import check_text, check_texts
from selfrag_jax.textgrad.engine import EngineLM, Request, ask_all
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
from selfrag_jax.textgrad.variable import Message, Variable, check_variable, check_variables, join

OUTPUT_ROLE = "response from the language model"
_groups = itertools.count()


class Function(abc.ABC):
  """An operation that makes a variable from variables."""

  @abc.abstractmethod
  def forward(self, *args: Any, **kwargs: Any) -> Variable:
    """Make the variable."""

  def __call__(self, *args: Any, **kwargs: Any) -> Variable:
    """Make the variable."""
    return self.forward(*args, **kwargs)


class BackwardContext:
  """A function with its arguments, as the `grad_fn` of a variable that the caller's own function has made."""

  def __init__(self, backward_fn: Callable[..., Any], *args: Any, **kwargs: Any):
    """Keep the arguments of `backward_fn` besides `backward_engine`."""
    self.backward_fn, self.args, self.kwargs = backward_fn, args, kwargs

  def __call__(self, backward_engine: EngineLM) -> Any:
    """Call the function."""
    return self.backward_fn(*self.args, **self.kwargs, backward_engine=backward_engine)


class Module(Function):
  """An operation with parameters."""

  def parameters(self) -> list[Variable]:
    """Return the variables that an optimizer may change."""
    return []

  def named_parameters(self) -> Iterator[tuple[str, Variable]]:
    """Yield the parameters with their roles."""
    for parameter in self.parameters():
      yield parameter.get_role_description(), parameter

  def zero_grad(self) -> None:
    """Forget the critiques of all parameters."""
    for parameter in self.parameters():
      parameter.reset_gradients()


class EngineCall(Function):
  """A call of a language model; backward, inputs and system prompt are criticised in the light of the answer."""

  def __init__(self, engine: EngineLM | str | None, system_prompt: Variable | None = None):
    """Make the call; `engine` is an engine, its name, or None for the backward engine."""
    self.engine = resolve_engine(engine)
    self.system_prompt = None if system_prompt is None else check_variable(system_prompt, "system_prompt")
    if self.system_prompt is not None:
      _text_of(self.system_prompt)

  def _ask(self, content: Content, inputs: Sequence[Variable], role: str | None) -> Variable:
    """Ask the engine; the answer always requires gradients, since it may itself be improved."""
    system = None if self.system_prompt is None else self.system_prompt.get_value()
    (text,) = ask_all(self.engine, [Request(content, system)])
    sources = [*([] if self.system_prompt is None else [self.system_prompt]), *inputs]
    response = Variable(text, predecessors=sources, role_description=OUTPUT_ROLE if role is None else role)
    response.grad_fn = functools.partial(_llm_backward, response, content, system)
    return response


class LLMCall(EngineCall):
  """Ask a language model a text."""

  def forward(self, input_variable: Variable, response_role_description: str | None = None) -> Variable:
    """Ask the engine the input's value."""
    check_variable(input_variable, "the input")
    return self._ask(_text_of(input_variable), [input_variable], response_role_description)


class FormattedLLMCall(EngineCall):
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
    self.format_string, self.fields = check_text(format_string, "format_string"), _by_name(fields, "fields")

  def forward(self, inputs: Mapping[str, Variable], response_role_description: str | None = None) -> Variable:
    """Ask the engine. Raises ValueError when the names of the inputs are not the fields."""
    inputs = _named(inputs, self.fields)
    content = fill_format(self.format_string, {name: _text_of(v) for name, v in inputs.items()})
    return self._ask(content, list(inputs.values()), response_role_description)


class MultimodalLLMCall(EngineCall):
  """Ask a language model a list of texts and images."""

  def forward(self, input_content: Sequence[Variable], response_role_description: str | None = None) -> Variable:
    """Ask the engine the values in their order."""
    inputs = check_variables(input_content, "the input")
    return self._ask([v.get_value() for v in inputs], inputs, response_role_description)


class OrderedFieldsMultimodalLLMCall(EngineCall):
  """Ask a language model texts and images, each text under the name of its field."""

  def __init__(self, engine: EngineLM | str | None, fields: Sequence[str], system_prompt: Variable | None = None):
    """Make the call; the inputs are put in the order of `fields`."""
    super().__init__(engine, system_prompt)
    self.fields = check_texts(fields, "fields")

  def forward(self, inputs: Mapping[str, Variable], response_role_description: str | None = None) -> Variable:
    """Ask the engine. Raises ValueError when the names of the inputs are not the fields."""
    inputs = _named(inputs, self.fields)
    values = [(name, inputs[name].get_value()) for name in self.fields]
    content = [value if isinstance(value, bytes) else f"**{name}**: {value}" for name, value in values]
    return self._ask(content, [inputs[name] for name in self.fields], response_role_description)


class StringBasedFunction(Function):
  """A function of texts, such as a unit test; backward, its inputs are criticised in the light of what it returned."""

  def __init__(self, fn: Callable[..., str | int], function_purpose: str):
    """Make a function; it is called with variables by name, and `function_purpose` tells critics what it does."""
    if not callable(fn):
      raise TypeError(f"fn must be a function, not {type(fn).__name__}")
    self.fn, self.function_purpose = fn, check_text(function_purpose, "function_purpose")

  def forward(self, inputs: Mapping[str, Variable], response_role_description: str | None = None) -> Variable:
    """Call the function. Raises TypeError when it returns neither text nor an integer."""
    inputs, role = _named(inputs, None), response_role_description
    if role is None:
      role = f"output of the function with the purpose: {self.function_purpose}"
    value = self.fn(**inputs)
    try:
      response = Variable(value, predecessors=list(inputs.values()), role_description=role)
    except (TypeError, ValueError) as error:
      raise type(error)(f"the function {self.function_purpose!r} returned an unusable value: {error}") from None
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


def llm_call(
  input_variable: Variable,
  engine: EngineLM | str | None,
  response_role_description: str | None = None,
  system_prompt: Variable | None = None,
) -> Variable:
  """Ask a language model, once."""
  return LLMCall(engine, system_prompt)(input_variable, response_role_description)


def formatted_llm_call(
  inputs: Mapping[str, Variable],
  response_role_description: str | None,
  engine: EngineLM | str | None,
  format_string: str,
  fields: Mapping[str, Any],
  system_prompt: Variable | None = None,
) -> Variable:
  """Ask a language model a text with several variables in it, once."""
  return FormattedLLMCall(engine, format_string, fields, system_prompt)(inputs, response_role_description)


def sum(variables: Sequence[Variable]) -> Variable:  # TextGrad's name, after torch.sum
  """Join variables line by line; backward, each receives the critiques of the whole."""
  return join(variables, "\n")


def aggregate(variables: Sequence[Variable]) -> Variable:
  """Join variables line by line; backward, the engine combines the critiques that one variable receives from it."""
  total = join(variables, "\n")
  total._groups = (next(_groups),)
  return total


def _text_of(v: Variable) -> str:
  if not isinstance(v.get_value(), str):
    raise TypeError(f"{v.role_description!r} is an image; MultimodalLLMCall takes a list of images and texts")
  return v.get_value()


def _by_name(values: Any, name: str) -> dict[str, Any]:
  if not isinstance(values, Mapping):
    raise TypeError(f"{name} must be a dict by name, not {type(values).__name__}")
  return dict(values)


def _named(inputs: Any, fields: Collection[str] | None) -> dict[str, Variable]:
  """Return the inputs of a call, variables by name; None takes any names."""
  inputs = _by_name(inputs, "the inputs")
  if fields is not None and set(inputs) != set(fields):
    raise ValueError(f"the call has the fields {list(fields)}, the inputs are {list(inputs)}")
  return {name: check_variable(v, f"inputs[{name!r}]") for name, v in inputs.items()}


def _llm_backward(response: Variable, content: Content, system: str | None, backward_engine: EngineLM) -> list[Message]:
  """Ask for critiques of a language model's inputs. Images come before the question, as they were shown."""
  parts = [content] if isinstance(content, str) else content
  prompt = " ".join("(image above)" if isinstance(part, bytes) else part for part in parts)
  images = [part for part in parts if isinstance(part, bytes)]
  fields = {"system_prompt": system or "", "prompt": prompt, "response_value": response.get_value()}
  return _ask_critiques("llm", response, fill(LLM_CONVERSATION, **fields), images, prompt)


def _function_backward(
  response: Variable, inputs: Mapping[str, Variable], purpose: str, backward_engine: EngineLM
) -> list[Message]:
  """Ask for critiques of a function's inputs."""
  shown = {name: f"**{name}** ({v.get_role_description()}): {v.get_value()}" for name, v in inputs.items()}
  fields = {"function_purpose": purpose, "inputs": "\n\n".join(shown.values()), "response_value": response.get_value()}
  # a text that is being improved, such as a program, is the same in all samples
  sample = [shown[name] for name, v in inputs.items() if not v.requires_grad] or shown.values()
  return _ask_critiques("function", response, fill(FUNCTION_CONVERSATION, **fields), [], "\n\n".join(sample))


def _ask_critiques(kind: str, response: Variable, conversation: str, images: list[bytes], sample: str) -> list[Message]:
  messages, feedback, groups = [], response.get_gradient_text(), response.groups()
  own = {"sample": sample, "output": response.get_value()}
  loss_context = {**response.context_of_loss(), **own, **response.loss_context}
  for v in response.predecessors:
    if not v.requires_grad:
      continue
    roles = {"response_desc": response.get_role_description(), "variable_desc": v.get_role_description()}
    fields = {**roles, "variable_short": v.get_short_value(), "response_gradient": feedback}
    request = Request(_below(images, backward_prompt(kind, conversation, fields)), BACKWARD_SYSTEM_PROMPT)
    context = {"context": _below(images, conversation), **roles}
    messages.append(Message(v, request, context=context, loss_context=loss_context, groups=groups))
  return messages


def _below(images: list[bytes], text: str) -> Content:
  return [*images, text] if images else text
