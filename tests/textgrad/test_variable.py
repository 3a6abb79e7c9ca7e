"""The graph of texts: each critique arrives once, in order, from all branches, at any depth."""

import itertools
import json
import threading
import time

import numpy as np
import pytest

import selfrag_jax.textgrad as tg
from selfrag_jax.textgrad.images import LARGEST_IMAGE
from selfrag_jax.textgrad.variable import OrderedSet, levels


def text(value="text", role="a text", **options):
  return tg.Variable(value, role_description=role, **options)


def numbered(**options):
  """An engine whose answers say how many came before."""
  count = itertools.count()
  return tg.CallableEngine(lambda content, system: f"answer {next(count)}", concurrency=1, **options)


def prompts_of(engine):
  return [content for content, _ in engine.calls]


def test_value_and_role():
  v = text(7, "a count")
  assert (v.value, str(v), v.get_role_description(), v.requires_grad) == ("7", "7", "a count", True)
  v.set_value("8")
  v.set_role_description("a number")
  assert (v.get_value(), v.role_description) == ("8", "a number")
  assert text(" ".join(map(str, range(30)))).get_short_value(2) == "0 1 (...) 28 29"
  assert text("a b c").get_short_value(2) == "a b c"


@pytest.mark.parametrize("value", [1.5, None, True, ["a"]])
def test_other_values_are_refused(value):
  with pytest.raises(TypeError, match=type(value).__name__):
    text(value)


def test_role_description_is_asked_for():
  with pytest.raises(TypeError, match="role_description"):
    tg.Variable("x")


def test_what_needs_no_gradient_cannot_come_from_what_does():
  with pytest.raises(ValueError, match="requires no gradient"):
    text(predecessors=[text()], requires_grad=False)


def test_what_a_call_makes_requires_gradients_whatever_it_was_made_from():
  engine, fixed = numbered(), lambda: text(requires_grad=False)
  image = text(b"\x89PNG", requires_grad=False)
  made = {
    "BlackboxLLM": tg.BlackboxLLM(engine, "fixed")(fixed()),
    "LLMCall": tg.LLMCall(engine)(fixed()),
    "llm_call": tg.llm_call(fixed(), engine),
    "FormattedLLMCall": tg.FormattedLLMCall(engine, "{a}", {"a": None})({"a": fixed()}),
    "formatted_llm_call": tg.formatted_llm_call({"a": fixed()}, "answer", engine, "{a}", {"a": None}),
    "MultimodalLLMCall": tg.MultimodalLLMCall(engine)([image, fixed()]),
    "OrderedFieldsMultimodalLLMCall": tg.OrderedFieldsMultimodalLLMCall(engine, ["a"])({"a": fixed()}),
    "StringBasedFunction": tg.StringBasedFunction(lambda a: a.value, "copies")({"a": fixed()}),
    "TextLoss": tg.TextLoss("judge", engine)(fixed()),
    "MultiFieldEvaluation": tg.MultiFieldEvaluation(fixed(), ["a"], engine)([fixed()]),
    "MultiChoiceTestTime": tg.MultiChoiceTestTime("judge", engine)("which?", fixed()),
    "ImageQALoss": tg.ImageQALoss("judge", engine)(image, fixed(), fixed()),
  }
  assert [name for name, v in made.items() if not v.requires_grad] == []
  for join in (tg.sum, tg.aggregate, lambda vs: vs[0] + vs[1]):  # a sum is what its parts are, as in TextGrad
    assert not join([fixed(), fixed()]).requires_grad
    assert join([fixed(), text()]).requires_grad


def test_an_answer_to_a_fixed_question_is_improved():
  """The first example of TextGrad's README."""
  engine = tg.CallableEngine(
    lambda content, system: "<IMPROVED_VARIABLE>one hour</IMPROVED_VARIABLE>" if "optimizer" in system else "72 minutes"
  )
  with tg.backward_engine(engine):
    answer = tg.BlackboxLLM(engine, "reason")(text("How long do 30 shirts take?", requires_grad=False))
    optimizer = tg.TGD(parameters=[answer])
    tg.TextLoss("Is it right?")(answer).backward()
    optimizer.step()
  assert answer.value == "one hour"


def test_a_question_that_is_fixed_costs_no_critique():
  engine = numbered()
  answer = tg.LLMCall(engine)(text("q", requires_grad=False))
  answer.backward(engine)
  assert len(engine.calls) == 1


def test_a_function_of_ones_own_in_the_style_of_textgrad():
  class Twice(tg.autograd.Function):
    def forward(self, v):
      made = text(v.value * 2, "twice", predecessors=[v])
      made.set_grad_fn(tg.autograd.BackwardContext(self.backward, v=v, made=made))
      return made

    def backward(self, v, made, backward_engine):
      v.gradients.add(text(backward_engine(made.get_gradient_text()), "feedback"))

  v, engine = text("ab"), numbered()
  loss = tg.TextLoss("judge", engine)(Twice()(v))
  loss.backward(engine)
  assert v.get_gradient_text() == "answer 2"


def test_images(tmp_path):
  (tmp_path / "a.png").write_bytes(b"\x89PNG data")
  assert text("", image_path=str(tmp_path / "a.png"), requires_grad=False).value == b"\x89PNG data"
  with pytest.raises(ValueError, match="no gradients"):
    text(b"\x89PNG")
  with pytest.raises(ValueError, match="not both"):
    text("x", image_path="a.png")
  with (tmp_path / "large.png").open("wb") as file:
    file.truncate(LARGEST_IMAGE + 1)
  with pytest.raises(ValueError, match="larger than 20 MiB"):
    text("", image_path=str(tmp_path / "large.png"), requires_grad=False)


def test_diamond_receives_two_critiques_in_order():
  engine = numbered()
  root = text("prompt", "system prompt")
  left = tg.LLMCall(engine)(root, "left")
  right = tg.LLMCall(engine)(root, "right")
  tg.sum([left, right]).backward(engine)
  assert [g.value for g in root.gradients] == ["answer 2", "answer 3"]
  contexts = [root.gradients_context[g]["response_desc"] for g in root.gradients]
  assert contexts == ["left", "right"]


def test_no_critique_is_doubled():
  engine = numbered()
  a, b = text("a"), text("b")
  for total in (a + b, tg.sum([a, b])):
    for v in (a, b):
      v.reset_gradients()
    loss = tg.TextLoss("judge", engine)(total)
    loss.backward(engine)
    assert len(total.gradients) == len(a.gradients) == len(b.gradients) == 1
    assert next(iter(total.gradients)).value in next(iter(a.gradients)).value


def test_critiques_accumulate_until_they_are_forgotten():
  engine, v = numbered(), text()
  optimizer = tg.TGD([v], engine=engine)
  for n in (1, 2):
    tg.TextLoss("judge", engine)(v).backward(engine)
    assert len(v.gradients) == n
  optimizer.zero_grad()
  assert not v.gradients
  assert not v.gradients_context


def test_first_critic_sees_the_judgement_and_later_ones_the_critique():
  engine = numbered()
  system = text("be brief", "system prompt")
  answer = tg.BlackboxLLM(engine, system)(text("why?", "question", requires_grad=False))
  tg.TextLoss("is it right?", engine)(answer).backward(engine)
  first, second = prompts_of(engine)[2:]
  assert "is it right?" in first
  assert "answer 0" in first
  assert "answer 1" in first
  assert "feedback on the <LM_OUTPUT> is met: answer 2" in second
  assert "<VARIABLE> be brief </VARIABLE>" in second
  assert "why?" in second


def test_loss_context_reaches_the_prompt():
  engine = numbered()
  system = text("be brief", "system prompt")
  answer = tg.BlackboxLLM(engine, system)(text("why?", "question", requires_grad=False))
  loss = tg.TextLoss("judge", engine)(answer)
  loss.loss_context = {"target": "42", "score": 0.0}
  loss.backward(engine)
  (gradient,) = system.gradients
  assert gradient.loss_context == {"sample": "why?", "output": "answer 0", "target": "42", "score": 0.0}


def test_user_text_with_tags_and_braces_is_left_alone():
  engine = numbered()
  nasty = 'say {"a": {variable_desc}} </LM_INPUT> <VARIABLE> {0} {{x}}'
  v = text(nasty)
  tg.TextLoss("judge {conversation}", engine)(v).backward(engine)
  tg.TGD([v], engine=tg.CallableEngine(["<IMPROVED_VARIABLE>x</IMPROVED_VARIABLE>"])).step()
  assert nasty in prompts_of(engine)[1]
  assert "judge {conversation}" in prompts_of(engine)[1]


def test_prompts_are_the_same_in_every_run_and_at_any_speed():
  def run(pauses):
    pause, lock, log = iter(pauses), threading.Lock(), []

    def answer(content, system):
      with lock:
        seconds = next(pause)
      time.sleep(seconds)
      log.append(content)
      return f"answer to {sorted(map(hash_of, content.split()))[:3]}"

    engine = tg.CallableEngine(answer)
    system = text("be brief", "system prompt")
    model = tg.BlackboxLLM(engine, system)
    losses = [tg.TextLoss("judge", engine)(model(text(f"q{i}", "question", requires_grad=False))) for i in range(4)]
    tg.sum(losses).backward(engine)
    update = tg.CallableEngine(["<IMPROVED_VARIABLE>x</IMPROVED_VARIABLE>"])
    tg.TGD([system], engine=update).step()
    return sorted(log), prompts_of(update)

  slow_first = [0] * 8 + [0.05, 0.03, 0.01, 0] * 2
  assert run([0] * 16) == run(slow_first)


def hash_of(word):
  return sum(word.encode()) % 97


def test_independent_calls_run_at_once():
  """16 samples need no more than 3 calls one after the other, counted by a barrier and not by a clock."""
  together = threading.Barrier(16)

  def answer(content, system):
    together.wait(timeout=20)  # 16 callers must be here at the same moment
    return "x"

  engine = tg.CallableEngine(answer, concurrency=16)
  quick = tg.CallableEngine(lambda content, system: "x")
  system = text("be brief", "system prompt")
  model = tg.BlackboxLLM(quick, system)
  losses = [tg.TextLoss("judge", quick)(model(text(f"q{i}", requires_grad=False))) for i in range(16)]
  tg.sum(losses).backward(engine)
  assert len(system.gradients) == 16


def test_engines_that_take_one_call_at_a_time_get_one():
  busy = threading.Lock()

  def answer(content, system):
    assert busy.acquire(blocking=False)
    time.sleep(0.001)
    busy.release()
    return "x"

  engine, v = tg.CallableEngine(answer, concurrency=1), text()
  tg.sum([tg.LLMCall(engine)(v) for _ in range(5)]).backward(engine)
  assert len(v.gradients) == 5


@pytest.mark.parametrize("shape", ["chain", "wide"])
def test_large_graphs(shape):
  engine = tg.CallableEngine(lambda content, system: "x")
  root = text("start")
  v = root
  if shape == "chain":
    for _ in range(10_000):
      v = tg.sum([v])
  else:
    v = tg.sum([tg.sum([root]) for _ in range(5_000)])
  loss = tg.TextLoss("judge", engine)(v)
  loss.backward(engine)
  assert len(root.gradients) == (1 if shape == "chain" else 5_000)


def test_levels_come_after_what_was_made_from_them():
  a = text("a")
  b = text("b", predecessors=[a])
  c = text("c", predecessors=[a, b])
  assert levels(c) == [[c], [b], [a]]


def test_cycle_is_named():
  v = text("x", "the snake")
  v.predecessors.add(v)
  with pytest.raises(tg.GraphError, match="the snake"):
    v.backward(numbered())


def test_failing_call_keeps_critiques_and_texts():
  def answer(content, system):
    if "q1" in content:
      raise tg.EngineError("HTTP 500")
    return "x"

  quick, system = tg.CallableEngine(lambda content, system: "x"), text("be brief")
  losses = [tg.BlackboxLLM(quick, system)(text(f"q{i}", requires_grad=False)) for i in range(3)]
  with pytest.raises(tg.EngineError, match="HTTP 500"):
    tg.sum(losses).backward(tg.CallableEngine(answer, concurrency=1))
  assert system.value == "be brief"
  assert len(system.gradients) == 1


def test_empty_answer_is_no_critique_and_none_is_an_error():
  v = text()
  tg.TextLoss("judge", numbered())(v).backward(tg.CallableEngine(["  "]))
  assert not v.gradients
  with pytest.raises(tg.EngineError, match="NoneType"):
    tg.TextLoss("judge", numbered())(v).backward(tg.CallableEngine(lambda content, system: None))


def test_aggregate_puts_critiques_into_one():
  engine = numbered()
  system = text("be brief", "system prompt")
  model = tg.BlackboxLLM(engine, system)
  losses = [tg.TextLoss("judge", engine)(model(text(f"q{i}", requires_grad=False))) for i in range(3)]
  tg.aggregate(losses).backward(engine)
  (combined,) = system.gradients
  assert len(combined.parts) == 3
  assert [p.loss_context["sample"] for p in combined.parts] == ["q0", "q1", "q2"]
  content, asked = engine.calls[-1]
  assert content.count("<FEEDBACK>") == 3
  assert "Put them into one" in asked
  assert combined.value == f"answer {len(engine.calls) - 1}"


def test_string_based_function():
  def length(instance):
    return f"{len(instance.value)} characters"

  engine, v = numbered(), text("hello", "a greeting")
  loss = tg.StringBasedFunction(length, "counts characters")({"instance": v})
  assert loss.value == "5 characters"
  loss.backward(engine)
  assert len(v.gradients) == 1
  assert "counts characters" in prompts_of(engine)[0]
  assert "hello" in prompts_of(engine)[0]


def test_grad_fn_in_the_style_of_textgrad():
  v = text()
  loss = text("loss", predecessors=[v])
  loss.set_grad_fn(lambda backward_engine: v.gradients.add(text(backward_engine("p"), "feedback")) or None)
  loss.backward(numbered())
  assert v.get_gradient_text() == "answer 0"


def test_save_and_load(tmp_path):
  engine = numbered()
  system, image = text("be brief", "system prompt"), text(b"\x89PNG", "image", requires_grad=False)
  answer = tg.MultimodalLLMCall(engine, system)([text("what?", requires_grad=False), image])
  losses = [tg.TextLoss("judge", engine)(answer)]
  total = tg.aggregate(losses)
  total.backward(engine)
  next(iter(system.gradients)).embedding = np.arange(3, dtype=np.float32)
  path = str(tmp_path / "graph.json")
  total.save(path)
  loaded = tg.Variable.load(path)
  old, new = ([v for level in levels(root) for v in level] for root in (total, loaded))
  assert [(v.value, v.role_description, v.requires_grad) for v in old] == [
    (v.value, v.role_description, v.requires_grad) for v in new
  ]
  for a, b in zip(old, new, strict=True):
    assert a.get_gradient_text() == b.get_gradient_text()
    assert [a.gradients_context.get(g) for g in a.gradients] == [b.gradients_context[g] for g in b.gradients]
  loaded_system = next(v for v in new if v.role_description == "system prompt")
  (gradient,) = loaded_system.gradients
  np.testing.assert_array_equal(gradient.embedding, np.arange(3))
  assert gradient.loss_context["output"] == answer.value


@pytest.mark.parametrize(
  "content", ["not json", "{}", json.dumps({"format": 99}), '{"format": 1, "variables": [], "root": 0}']
)
def test_other_files_are_no_variables(tmp_path, content):
  path = tmp_path / "graph.json"
  path.write_text(content)
  with pytest.raises(ValueError, match=r"graph\.json"):
    tg.Variable.load(str(path))


def test_graph():
  engine, v = numbered(), text('a <tag> & "quote"\x00 ' + "word " * 300, "the start")
  loss = tg.TextLoss("judge", engine)(v)
  loss.backward(engine)
  source = loss.generate_graph(print_gradients=True).source
  assert "&lt;tag&gt; &amp;" in source
  assert "the start" in source
  assert "answer 1" in source
  assert source.count("->") == 2
  assert "\x00" not in source


def test_ordered_set():
  s = OrderedSet("cab")
  s.add("c")
  s.discard("z")
  assert list(s) == ["c", "a", "b"]
  assert len(s) == 3
  assert "a" in s
  s.remove("a")
  assert list(s) == ["c", "b"]
