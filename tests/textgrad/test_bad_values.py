"""Wrong values: whatever is not a text, variable, list or number gives a readable error where it is passed."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import selfrag_jax.textgrad as tg

ENGINE = tg.CallableEngine(lambda content, system: "fine")


def text(value="text", role="a text", **options):
  return tg.Variable(value, role_description=role, **options)


def image():
  return text(b"\x89PNG", "an image", requires_grad=False)


@pytest.mark.parametrize("role", [None, 3, b"role", ["role"]])
def test_roles_are_texts(role):
  with pytest.raises(TypeError, match=f"role_description must be text.*{type(role).__name__}"):
    text(role=role)
  with pytest.raises(TypeError, match="role_description"):
    text().set_role_description(role)


@pytest.mark.parametrize("value", [1.5, None, True, ["a"], b"\x89PNG"])
def test_a_value_that_is_set_is_checked_as_one_that_is_made(value):
  v = text("before")
  with pytest.raises((TypeError, ValueError)):
    v.set_value(value)
  assert v.value == "before"
  v.set_value(7)
  assert v.value == "7"


@settings(max_examples=30, deadline=None)
@given(st.builds("{}{}{}".format, st.text(), st.characters(categories=["Cs"]), st.text()))
def test_half_of_a_surrogate_pair_is_refused_before_it_is_sent(bad):
  v, message = text(), "half of a surrogate pair, U\\+D[89A-F]..,"
  makers = (
    lambda: text(bad),
    lambda: text(role=bad),
    lambda: v.set_value(bad),
    lambda: v.set_role_description(bad),
    lambda: tg.TextLoss(bad, ENGINE),
    lambda: tg.BlackboxLLM(ENGINE, bad),
    lambda: tg.StringBasedFunction(lambda x: bad, "finds")({"x": v}),
    lambda: tg.FormattedLLMCall(ENGINE, bad, {}),
    lambda: tg.TGD([v], engine=ENGINE, constraints=[bad]),
    lambda: tg.TGD([v], engine=ENGINE, optimizer_system_prompt=bad),
  )
  for make in makers:
    with pytest.raises(ValueError, match=message):
      make()


def test_half_of_a_surrogate_pair_in_an_answer_is_replaced_whatever_the_engine():
  class Engine(tg.EngineLM):
    def generate(self, content, system_prompt=None, **sampling):
      return "bad \ud800"

  assert tg.BlackboxLLM(Engine())(text()).value == "bad ?"


@pytest.mark.parametrize(
  "call",
  [
    lambda: tg.BlackboxLLM(ENGINE)("a question"),
    lambda: tg.LLMCall(ENGINE)([text()]),
    lambda: tg.LLMCall(ENGINE, "a system prompt"),
    lambda: tg.FormattedLLMCall(ENGINE, "{a}", {"a": None})({"a": "text"}),
    lambda: tg.MultimodalLLMCall(ENGINE)(["x"]),
    lambda: tg.StringBasedFunction(len, "counts")({"x": "text"}),
    lambda: tg.MultiFieldEvaluation(text(), ["a"], ENGINE)(["text"]),
    lambda: tg.MultiFieldTokenParsedEvaluation(text(), ["a"], ENGINE).parse_output("text"),
    lambda: tg.MultiChoiceTestTime("judge", ENGINE)("which?", "text"),
    lambda: tg.ImageQALoss("judge", ENGINE)(image(), text(), "text"),
    lambda: tg.sum(["text"]),
    lambda: tg.TGD(["text"], engine=ENGINE),
    lambda: text(predecessors=["text"]),
  ],
)
def test_a_text_in_place_of_a_variable(call):
  with pytest.raises(TypeError, match=r"must be a Variable, not (str|list)"):
    call()


@pytest.mark.parametrize(
  "call",
  [
    lambda: tg.sum(text()),
    lambda: tg.aggregate(text()),
    lambda: tg.TGD(text(), engine=ENGINE),
    lambda: tg.MultimodalLLMCall(ENGINE)(text()),
    lambda: text(predecessors=text()),
  ],
)
def test_one_variable_in_place_of_a_list(call):
  with pytest.raises(TypeError, match=r"list of variables, not one Variable; write \[\.\.\.\]"):
    call()


def test_sums_of_nothing_of_images_and_of_other_things():
  for join in (tg.sum, tg.aggregate):
    with pytest.raises(ValueError, match="no variables"):
      join([])
    with pytest.raises(ValueError, match="an image"):
      join([text(), image()])
  with pytest.raises(TypeError, match="unsupported operand"):
    text() + "x"


def test_images_go_into_multimodal_calls_alone():
  with pytest.raises(TypeError, match="MultimodalLLMCall"):
    tg.LLMCall(ENGINE)(image())
  with pytest.raises(TypeError, match="MultimodalLLMCall"):
    tg.FormattedLLMCall(ENGINE, "{a}", {"a": None})({"a": image()})
  with pytest.raises(TypeError, match="MultimodalLLMCall"):
    tg.BlackboxLLM(ENGINE, image())


@pytest.mark.parametrize("path", [3, None, ["a.png"], b"a.png"])
def test_paths_of_images_are_paths(path, tmp_path):
  (tmp_path / "a.png").write_bytes(b"\x89PNG")
  assert text("", image_path=tmp_path / "a.png", requires_grad=False).value == b"\x89PNG"
  with pytest.raises(TypeError, match=type(path).__name__):
    text("", image_path=path, requires_grad=False)


@pytest.mark.parametrize("name", ["accept", "gradient_store", "rag"])
def test_parts_of_an_optimizer_are_what_they_are_called(name):
  with pytest.raises(TypeError, match=f"{name} must be a .*, not dict"):
    tg.TGD([text()], engine=ENGINE, use_gradient_rag=True, **{name: {}})


@pytest.mark.parametrize("value", [None, 1.5, ["a"], object()])
def test_what_a_function_returns_is_checked_by_its_name(value):
  with pytest.raises(TypeError, match=f"'runs the tests' returned.*{type(value).__name__}"):
    tg.StringBasedFunction(lambda x: value, "runs the tests")({"x": text()})


def test_losses_refuse_roles_that_collide():
  for roles in (["a", "a"], ["instruction"]):
    with pytest.raises(ValueError, match="must differ"):
      tg.MultiFieldEvaluation(text(), roles, ENGINE)
  with pytest.raises(TypeError, match=r"role_descriptions must be a list of texts, not str; write \[\.\.\.\]"):
    tg.MultiFieldEvaluation(text(), "prediction", ENGINE)
  with pytest.raises(ValueError, match="opening and a closing tag"):
    tg.MultiFieldTokenParsedEvaluation(text(), ["a"], ENGINE, parse_tags=["<A>"])


@pytest.mark.parametrize("name", ["constraints", "in_context_examples", "new_variable_tags"])
def test_one_text_in_place_of_a_list_of_them(name):
  with pytest.raises(TypeError, match=f"{name} must be a list of texts, not str"):
    tg.TGD([text()], engine=ENGINE, **{name: "be brief"})
  with pytest.raises(TypeError, match=rf"{name}\[0\] must be text"):
    tg.TGD([text()], engine=ENGINE, **{name: [3, 4]})


@pytest.mark.parametrize("name", ["gradient_memory", "momentum_window", "retries"])
def test_counts_are_integers_from_0(name):
  for value in (-1, -1000):
    with pytest.raises(ValueError, match=f"{name} = {value} must be at least 0"):
      tg.TGD([text()], engine=ENGINE, **{name: value})
  for value in (1.5, None, "3", True, math.nan):
    with pytest.raises(TypeError, match=f"{name} must be an integer, not {type(value).__name__}"):
      tg.TGD([text()], engine=ENGINE, **{name: value})


@pytest.mark.parametrize("name", ["gradient_memory", "momentum_window", "retries"])
@pytest.mark.parametrize("value", [2**31, pytest.param(10**30, id="10**30"), pytest.param(10**5000, id="10**5000")])
def test_counts_have_a_limit(name, value):
  with pytest.raises(ValueError, match=f"{name} must be at most 2147483647, it has {value.bit_length()} bits"):
    tg.TGD([text()], engine=ENGINE, **{name: value})


@pytest.mark.parametrize("value", [0, -1, 2, math.nan, math.inf])
def test_the_learning_rate_is_a_share(value):
  with pytest.raises(ValueError, match=r"learning_rate.*above 0, at most 1"):
    tg.TGD([text()], engine=ENGINE, learning_rate=value)


@pytest.mark.parametrize("value", [None, "0.5", True])
def test_the_learning_rate_is_a_number(value):
  with pytest.raises(TypeError, match="learning_rate must be a number"):
    tg.TGD([text()], engine=ENGINE, learning_rate=value)


def test_parameters_are_some_and_each_is_there_once():
  v = text(role="the prompt")
  with pytest.raises(ValueError, match="no parameters"):
    tg.TGD(parameters=[], engine=ENGINE)
  with pytest.raises(ValueError, match="'the prompt' is there twice"):
    tg.TGD([v, text(), v], engine=ENGINE)
  with pytest.raises(TypeError, match="no text"):
    tg.TGD([image()], engine=ENGINE)


def test_a_parameter_that_takes_no_critiques_is_said_to_be_so():
  fixed = text(requires_grad=False, role="the fixed prompt")
  with pytest.raises(tg.NoGradientError, match=r"the fixed prompt.*requires_grad=False"):
    tg.TGD([fixed], engine=ENGINE).step()


def test_system_prompts_of_the_optimizer_are_texts():
  with pytest.raises(TypeError, match="optimizer_system_prompt must be text"):
    tg.TGD([text()], engine=ENGINE, optimizer_system_prompt=None)


@pytest.mark.parametrize("engine", [3, [], tg.CallableEngine, object()])
def test_what_is_no_engine(engine):
  for make in (tg.BlackboxLLM, lambda e: tg.TextLoss("judge", e), lambda e: tg.TGD([text()], engine=e)):
    with pytest.raises(TypeError, match="engine"):
      make(engine)
  with pytest.raises(TypeError, match="engine"):
    text().backward(engine)
