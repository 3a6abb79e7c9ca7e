"""Losses: language models that judge a variable."""

from collections.abc import Sequence

from selfrag_jax.textgrad.autograd import FormattedLLMCall, LLMCall, Module, OrderedFieldsMultimodalLLMCall
from selfrag_jax.textgrad.checks import check_tags, check_texts
from selfrag_jax.textgrad.engine import EngineLM
from selfrag_jax.textgrad.replies import parse_tags
from selfrag_jax.textgrad.resolve import resolve_engine
from selfrag_jax.textgrad.variable import Variable, check_variable, check_variables

JUDGE = "system prompt for the evaluation"
TEST_TIME = """\
You judge solutions of multiple-choice problems, as a part of a system that improves them. Look into the reasoning and \
the answer from several sides and name what may be wrong, without solving the problem yourself."""


class TextLoss(Module):
  """A language model that judges a text by an instruction."""

  def __init__(self, eval_system_prompt: Variable | str, engine: EngineLM | str | None = None):
    """Make the judge; `eval_system_prompt` says what to look at."""
    self.eval_system_prompt = _fixed(eval_system_prompt, JUDGE)
    self.engine = resolve_engine(engine)
    self.llm_call = LLMCall(self.engine, self.eval_system_prompt)

  def forward(self, instance: Variable) -> Variable:
    """Judge the instance."""
    return self.llm_call(instance)


class MultiFieldEvaluation(Module):
  """A language model that judges several variables together, such as a prediction and the right answer."""

  def __init__(
    self,
    evaluation_instruction: Variable | str,
    role_descriptions: Sequence[str],
    engine: EngineLM | str | None = None,
    system_prompt: Variable | None = None,
  ):
    """Make the judge; `role_descriptions` name the inputs, in their order."""
    self.evaluation_instruction = _fixed(evaluation_instruction, "evaluation instruction")
    self.role_descriptions = check_texts(role_descriptions, "role_descriptions")
    if len({"instruction", *self.role_descriptions}) <= len(self.role_descriptions):
      raise ValueError(f"role_descriptions must differ, and none may be 'instruction': {self.role_descriptions}")
    self.engine = resolve_engine(engine)
    self.system_prompt = _fixed(system_prompt or "You judge how texts relate to each other.", JUDGE)
    # the inputs get names of their own: a format string could misread a role
    self._names = [f"input_{i}" for i in range(len(self.role_descriptions))]
    roles = [role.replace("{", "{{").replace("}", "}}") for role in self.role_descriptions]
    lines = ["{instruction}", *(f"**{role}**: {{{name}}}" for role, name in zip(roles, self._names, strict=True))]
    fields = dict.fromkeys(["instruction", *self._names])
    self.formatted_llm_call = FormattedLLMCall(self.engine, "\n".join(lines), fields, self.system_prompt)

  def forward(self, inputs: Sequence[Variable]) -> Variable:
    """Judge the inputs, which take the role descriptions. Raises ValueError unless there is one input for each role."""
    inputs = check_variables(inputs, "inputs")
    if len(inputs) != len(self.role_descriptions):
      raise ValueError(f"{len(inputs)} inputs for the roles {self.role_descriptions}")
    for role, v in zip(self.role_descriptions, inputs, strict=True):
      v.set_role_description(role)
    named = {"instruction": self.evaluation_instruction, **dict(zip(self._names, inputs, strict=True))}
    return self.formatted_llm_call(named, response_role_description="evaluation of the prediction")


class MultiFieldTokenParsedEvaluation(MultiFieldEvaluation):
  """A `MultiFieldEvaluation` whose verdict stands between two tags."""

  def __init__(
    self,
    evaluation_instruction: Variable | str,
    role_descriptions: Sequence[str],
    engine: EngineLM | str | None = None,
    system_prompt: Variable | None = None,
    parse_tags: Sequence[str] | None = None,
  ):
    """Make the judge; `parse_tags` are the opening and the closing tag."""
    super().__init__(evaluation_instruction, role_descriptions, engine, system_prompt)
    self.parse_tags = check_tags(parse_tags, "parse_tags", ("<RESULT>", "</RESULT>"))

  def parse_output(self, response: Variable) -> str:
    """Return the verdict. Raises ReplyError if it is not between the tags."""
    return parse_tags(check_variable(response, "the response").get_value(), self.parse_tags)


class MultiChoiceTestTime(Module):
  """A language model that criticises an answer to a multiple-choice question without knowing the right one."""

  def __init__(
    self,
    evaluation_instruction: str,
    engine: EngineLM | str | None = None,
    system_prompt: Variable | None = None,
  ):
    """Make the judge."""
    self.tt_system_prompt = _fixed(system_prompt or TEST_TIME, JUDGE)
    self.engine, self.instruction = resolve_engine(engine), evaluation_instruction
    format_string = "{instruction}\nQuestion: {question}\nAnswer by the language model: {prediction}"
    fields = dict.fromkeys(["instruction", "question", "prediction"])
    self.formatted_llm_call = FormattedLLMCall(self.engine, format_string, fields, self.tt_system_prompt)

  def forward(self, question: str, prediction: Variable) -> Variable:
    """Criticise the prediction."""
    check_variable(prediction, "the prediction")
    inputs = {
      "instruction": _fixed(self.instruction, "evaluation instruction"),
      "question": _fixed(question, "the multiple choice question"),
      "prediction": prediction,
    }
    return self.formatted_llm_call(inputs, response_role_description=f"evaluation of the {prediction.role_description}")


class ImageQALoss(Module):
  """A language model that judges the answer to a question about an image."""

  def __init__(
    self,
    evaluation_instruction: str,
    engine: EngineLM | str | None = None,
    system_prompt: Variable | None = None,
  ):
    """Make the judge."""
    self.evaluation_instruction = _fixed(evaluation_instruction, "evaluation instruction")
    self.engine = resolve_engine(engine)
    self.system_prompt = _fixed(system_prompt or "You judge answers to questions about images.", JUDGE)
    fields = ["Evaluation Instruction", "Question", "Image", "Answer"]
    self.multimodal_llm_call = OrderedFieldsMultimodalLLMCall(self.engine, fields, self.system_prompt)

  def forward(self, image: Variable, question: Variable, response: Variable) -> Variable:
    """Judge the response."""
    check_variable(response, "the response")
    values = (self.evaluation_instruction, question, image, response)
    inputs = dict(zip(self.multimodal_llm_call.fields, values, strict=True))
    return self.multimodal_llm_call(inputs, response_role_description=f"evaluation of the {response.role_description}")


def _fixed(value: Variable | str, role: str) -> Variable:
  return value if isinstance(value, Variable) else Variable(value, requires_grad=False, role_description=role)
