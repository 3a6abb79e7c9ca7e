"""The prompts for engines: TextGrad's tags and questions (arXiv 2406.07496), in our own words."""

import functools
import re
import string
from collections.abc import Mapping, Sequence

BACKWARD_SYSTEM_PROMPT = """\
You are the critic inside a system that improves texts step by step. A text that is being improved is called a \
variable: \
a prompt, an answer, a program, or any other text. You write the feedback that plays the part of a gradient.
Judge the variable by the goal in <OBJECTIVE_FUNCTION>, in the role that <ROLE> gives it; it will be used again in \
situations like this one. Say what in it leads to the shortcomings, why, and what kind of change would help. Do not \
write \
the new version: another model does that, and reads your feedback. If there is nothing to improve, say so in few words.

Tags that you will meet:
<LM_SYSTEM_PROMPT>, <LM_INPUT>, <LM_OUTPUT>: what a language model was told, asked, and answered.
<INPUTS_TO_FUNCTION>, <OUTPUT_OF_FUNCTION>: the same of a function.
<OBJECTIVE_FUNCTION>: the goal. <VARIABLE>: the text to judge. <ROLE>: what it is for."""

OPTIMIZER_SYSTEM_PROMPT = """\
You are the optimizer inside a system that improves texts step by step. You are shown a text, called the variable, and \
feedback on how it did; you write its next version. Feedback can be wrong or beside the point: weigh it, keep what \
several pieces agree on, and keep what works already. Stay within the role that <ROLE> gives the variable.
Answer with the new version alone, between {new_variable_start_tag} and {new_variable_end_tag}; what stands between \
them \
replaces the variable word for word.

Tags that you will meet:
<ROLE>: what the variable is for. <VARIABLE>: its present text. <CONVERSATION>: a use of it. <FEEDBACK>: criticism of \
it.
<PAST_FEEDBACK>: criticism from earlier steps, with how similar its case was, how often it was given, and whether the \
change that followed helped. <PAST_ITERATIONS>: earlier versions. <CONSTRAINTS>, <EXAMPLES>: what you must keep to."""

REDUCE_SYSTEM_PROMPT = """\
You work inside a system that improves texts step by step. You are shown several pieces of feedback on one text, each \
in \
<FEEDBACK> tags. Put them into one: what they agree on first, then what only some of them say, weighed by how well it \
is \
argued. Do not write a new version of the text."""

LLM_CONVERSATION = """\
<LM_SYSTEM_PROMPT> {system_prompt} </LM_SYSTEM_PROMPT>

<LM_INPUT> {prompt} </LM_INPUT>

<LM_OUTPUT> {response_value} </LM_OUTPUT>"""

FUNCTION_CONVERSATION = """\
Purpose of the function: {function_purpose}

<INPUTS_TO_FUNCTION> {inputs} </INPUTS_TO_FUNCTION>

<OUTPUT_OF_FUNCTION> {response_value} </OUTPUT_OF_FUNCTION>"""

BACKWARD = """\
You will criticise a variable with this role: <ROLE> {variable_desc} </ROLE>

{scene}

{conversation}

{objective}

Criticise this part of it:

<VARIABLE> {variable_short} </VARIABLE>

How should the {variable_desc} change to serve the <OBJECTIVE_FUNCTION> better?"""

SCENES = {
  ("llm", True): "It took part in this conversation with a language model:",
  ("llm", False): "A language model judged it as follows:",
  ("function", True): "It took part in this call of a function:",
  ("function", False): "A function judged it as follows:",
}

OBJECTIVE_CHAIN = """\
The <{output}> was used further on as {response_desc}.

<OBJECTIVE_FUNCTION> Criticise the variable so that this feedback on the <{output}> is met: {response_gradient} \
</OBJECTIVE_FUNCTION>"""

OBJECTIVE_BASE = (
  "<OBJECTIVE_FUNCTION> Make the judgement above a better one, by this variable alone. </OBJECTIVE_FUNCTION>"
)

GRADIENT = """\
In this conversation

<CONVERSATION> {context} </CONVERSATION>

whose outcome served as {response_desc}, the {variable_desc} received this feedback:

<FEEDBACK> {feedback} </FEEDBACK>"""

GRADIENT_AFTER_PARTS = """\
In the conversation above, whose outcome served as {response_desc}, the {variable_desc} received this feedback:

<FEEDBACK> {feedback} </FEEDBACK>"""

UPDATE_START = """\
The variable has this role: <ROLE> {variable_desc} </ROLE>

It reads: <VARIABLE> {variable_value} </VARIABLE>

This is how it was used, and the feedback that it received:

<CONTEXT>"""

UPDATE_END = "</CONTEXT>\n\nImprove the variable ({variable_desc}) by this feedback."
PAST_FEEDBACK = "Feedback from earlier steps, on cases like these:\n\n{records}"
GRADIENT_MEMORY = "Feedback of the steps before, oldest first:\n\n{records}"
MOMENTUM = """\
Earlier versions of the variable, oldest first:

<PAST_ITERATIONS>{records}
</PAST_ITERATIONS>

If the feedback has stayed the same through these versions, the changes were too small: change more."""
CONSTRAINTS = "Keep to these constraints:\n\n<CONSTRAINTS>{records}</CONSTRAINTS>"
EXAMPLES = "Follow these examples:\n\n<EXAMPLES>{records}</EXAMPLES>"
EDIT_BUDGET = "Change at most {percent} of its words."
TOO_LARGE_AN_EDIT = "Your last version changed {changed} of the words. Make a smaller change."
UPDATE_FORMAT = "Answer with {new_variable_start_tag}the improved variable{new_variable_end_tag} and nothing else."


def fill(template: str, **fields: str) -> str:
  """Put fields into a template of this module; braces and tags in the fields stay as they are."""
  pieces = [*_pieces(template)]
  pieces[1::2] = [fields.get(name, f"{{{name}}}") for name in pieces[1::2]]
  return "".join(pieces)


@functools.lru_cache(64)
def _pieces(template: str) -> list[str]:
  """Split a template into texts and names of fields, which take turns."""
  return re.split(r"\{(\w+)\}", template)


def fill_format(format_string: str, fields: Mapping[str, str]) -> str:
  """Put fields into a user's format string, as `str.format` does where it can.

  In a string that `str.format` cannot take, since it holds JSON or code, only the known `{fields}` are replaced.
  """
  try:
    parts = list(string.Formatter().parse(format_string))
  except ValueError:
    parts = None
  if parts is not None and all(name is None or name in fields for _, name, _, _ in parts):
    return "".join(literal + ("" if name is None else fields[name]) for literal, name, _, _ in parts)
  names = "|".join(re.escape(name) for name in fields)
  return re.sub(r"\{(" + names + r")\}", lambda found: fields[found[1]], format_string) if names else format_string


def shorten(text: str, n_words_offset: int = 10) -> str:
  """Return the first and last words of a long text, and a short text as it is."""
  words = text.split(" ")
  if len(words) <= 2 * n_words_offset:
    return text
  return " ".join(words[:n_words_offset]) + " (...) " + " ".join(words[-n_words_offset:])


def backward_prompt(kind: str, conversation: str, fields: Mapping[str, str]) -> str:
  """Return the prompt for a variable's critique; `kind` is llm or function; a loss's `response_gradient` is empty."""
  chained = bool(fields["response_gradient"].strip())
  output = "LM_OUTPUT" if kind == "llm" else "OUTPUT_OF_FUNCTION"
  objective = fill(OBJECTIVE_CHAIN, output=output, **fields) if chained else OBJECTIVE_BASE
  return fill(BACKWARD, scene=SCENES[kind, chained], conversation=conversation, objective=objective, **fields)


def reduce_prompt(gradients: Sequence[str]) -> str:
  """Return the prompt that asks for one critique from several."""
  return "\n".join(f"<FEEDBACK> {text} </FEEDBACK>" for text in gradients)
