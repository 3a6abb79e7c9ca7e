"""Losses: each asks one question and sends its critique to the text that it judges."""

import pytest

import selfrag_jax.textgrad as tg


def engine(answer="fine"):
  return tg.CallableEngine(lambda content, system: answer)


def text(value, role="a text", **options):
  return tg.Variable(value, role_description=role, **options)


def test_text_loss():
  e, v = engine(), text("an answer", "answer")
  loss = tg.TextLoss("Is it polite?", e)(v)
  assert loss.value == "fine"
  assert e.calls == [("an answer", "Is it polite?")]


def test_multi_field_evaluation_takes_instructions_with_braces():
  e = engine("<RESULT> 0 </RESULT>")
  instruction = text('Answer as {"ok": true} {question}', requires_grad=False)
  judge = tg.MultiFieldTokenParsedEvaluation(
    instruction, ["question", "prediction"], e, parse_tags=["<RESULT>", "</RESULT>"]
  )
  prediction = text("{question} is 4")
  loss = judge([text("2 + 2?", requires_grad=False), prediction])
  content, _ = e.calls[0]
  assert content == 'Answer as {"ok": true} {question}\n**question**: 2 + 2?\n**prediction**: {question} is 4'
  assert judge.parse_output(loss) == "0"
  assert prediction.role_description == "prediction"
  with pytest.raises(ValueError, match="1 inputs"):
    judge([prediction])


def test_verdict_without_tags_is_an_error():
  judge = tg.MultiFieldTokenParsedEvaluation(text("judge", requires_grad=False), ["prediction"], engine("yes"))
  with pytest.raises(tg.ReplyError, match="<RESULT>"):
    judge.parse_output(judge([text("x")]))


def test_multi_choice_test_time():
  e, prediction = engine(), text("(B)", "prediction")
  loss = tg.MultiChoiceTestTime("Look closely.", e)("Which one?", prediction)
  assert e.calls[0][0] == "Look closely.\nQuestion: Which one?\nAnswer by the language model: (B)"
  loss.backward(e)
  assert len(prediction.gradients) == 1


def test_image_loss_brings_the_image_to_critic_and_optimizer():
  e, response = engine("look again"), text("a cat", "response")
  image = text(b"\x89PNG data", "image", requires_grad=False)
  loss = tg.ImageQALoss("Is the answer right?", e)(image, text("What is it?", requires_grad=False), response)
  assert e.calls[0][0] == [
    "**Evaluation Instruction**: Is the answer right?",
    "**Question**: What is it?",
    b"\x89PNG data",
    "**Answer**: a cat",
  ]
  loss.backward(e)
  assert e.calls[1][0][0] == b"\x89PNG data"
  optimizer = tg.TGD([response], engine=engine("<IMPROVED_VARIABLE>a dog</IMPROVED_VARIABLE>"))
  optimizer.step()
  assert response.value == "a dog"
  assert b"\x89PNG data" in optimizer.engine.calls[0][0]


def test_formatted_call_checks_its_fields():
  call = tg.FormattedLLMCall(engine(), "{a} and {b}", {"a": None, "b": None})
  with pytest.raises(ValueError, match=r"\['a', 'b'\].*\['a'\]"):
    call({"a": text("x")})


@pytest.mark.parametrize(
  ("format_string", "expected"),
  [
    ("{a}-{b}", "1-{a}"),
    ('{{"x": {a}}}', '{"x": 1}'),  # written for str.format
    ('{"x": {"y": {a}}}', '{"x": {"y": 1}}'),  # not written for it
    ("{c} {a", "{c} {a"),
    ("{c} {a}", "{c} 1"),
  ],
)
def test_format_strings(format_string, expected):
  e = engine()
  tg.FormattedLLMCall(e, format_string, {"a": None, "b": None})({"a": text("1"), "b": text("{a}")})
  assert e.calls[0][0] == expected


def test_ordered_fields_are_checked():
  call = tg.OrderedFieldsMultimodalLLMCall(engine(), ["a"])
  with pytest.raises(ValueError, match="b"):
    call({"b": text("x")})
  with pytest.raises(TypeError, match="str"):
    tg.MultimodalLLMCall(engine())(["x"])


def test_no_engine_is_said_so(monkeypatch):
  monkeypatch.setattr(tg.SingletonBackwardEngine, "_engine", None)
  with pytest.raises(ValueError, match="set_backward_engine"):
    tg.TextLoss("judge")


def test_module_parameters():
  system = text("be brief")
  assert tg.BlackboxLLM(engine(), system).parameters() == [system]
  assert tg.BlackboxLLM(engine()).parameters() == []
  assert not tg.BlackboxLLM(engine(), "fixed").parameters()[0].requires_grad


def test_named_parameters():
  system = text("be brief", "system prompt")
  assert list(tg.BlackboxLLM(engine(), system).named_parameters()) == [("system prompt", system)]


def test_roles_may_be_any_text():
  roles = [
    "question",
    "question: part 2",
    "a!r",
    "a",
    "}",
    "{",
    "{question}",
    "a{b}",
    "",
    "a[0]",
    "a.b",
    "0",
    "input_1",
  ]
  engine = tg.CallableEngine(lambda content, system: "fine")
  inputs = [tg.Variable(f"<{i}>", requires_grad=False, role_description="x") for i in range(len(roles))]
  tg.MultiFieldEvaluation("Judge.", roles, engine)(inputs)
  assert engine.calls[0][0] == "\n".join(["Judge.", *(f"**{role}**: <{i}>" for i, role in enumerate(roles))])
