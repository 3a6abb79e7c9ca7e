"""The optimizer: its prompt, the texts that it may change, and its handling of replies without a new text."""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import selfrag_jax.textgrad as tg
from selfrag_jax.textgrad.replies import LONGEST, changed_share, limit_edit, parse_tags

TAGS = ("<IMPROVED_VARIABLE>", "</IMPROVED_VARIABLE>")


def answers(*texts):
  return tg.CallableEngine(list(texts), concurrency=1)


def improved(text):
  return f"{TAGS[0]}{text}{TAGS[1]}"


def parameter(value="be brief", *critiques, role="system prompt"):
  v = tg.Variable(value, role_description=role)
  for critique in critiques or ("say why",):
    v.gradients.add(tg.Variable(critique, role_description="feedback"))
  return v


def test_step_shows_text_and_critiques():
  p = parameter("be brief", "first", "second")
  optimizer = tg.TGD([p], engine=answers(improved("be clear")))
  (update,) = optimizer.step()
  prompt, system = optimizer.engine.calls[0]
  assert p.value == "be clear"
  assert (update.before, update.candidate) == ("be brief", "be clear")
  assert "<VARIABLE> be brief </VARIABLE>" in prompt
  assert prompt.index("first") < prompt.index("second")
  assert "between <IMPROVED_VARIABLE> and </IMPROVED_VARIABLE>" in system


def test_long_text_is_shown_whole():
  words = " ".join(f"word{i}" for i in range(500))
  optimizer = tg.TGD([parameter(words)], engine=answers(improved("x")))
  optimizer.step()
  assert words in optimizer.engine.calls[0][0]


def test_step_without_critiques_is_an_error():
  p = tg.Variable("be brief", role_description="system prompt")
  with pytest.raises(tg.NoGradientError, match="system prompt"):
    tg.TGD([p], engine=answers()).step()


def test_arguments_reach_the_prompt():
  p = parameter()
  optimizer = tg.TGD(
    [p],
    0,
    answers(improved("v1"), improved("v2"), improved("v3")),
    ["no jokes", "{braces} stay"],
    None,
    "Mine: {new_variable_start_tag} {other}",
    ["an example"],
    2,
    momentum_window=1,
  )
  for _ in range(3):
    optimizer.step()
  first, _, third = [content for content, _ in optimizer.engine.calls]
  assert optimizer.engine.calls[0][1] == "Mine: <IMPROVED_VARIABLE> {other}"
  assert "Constraint 1: no jokes\nConstraint 2: {braces} stay" in first
  assert "<EXAMPLES>an example</EXAMPLES>" in first
  assert "<FEEDBACK-1>" not in first
  assert "<PAST_ITERATIONS>" not in first
  assert "<FEEDBACK-1> say why </FEEDBACK-1>\n<FEEDBACK-2> say why </FEEDBACK-2>" in third
  assert "Version 1: v1" in third
  assert "Version 2" not in third


def test_own_tags():
  p = parameter()
  optimizer = tg.TGD([p], engine=answers("so: [NEW]better[/NEW]"), new_variable_tags=["[NEW]", "[/NEW]"])
  optimizer.step()
  assert p.value == "better"
  assert "[NEW]the improved variable[/NEW]" in optimizer.engine.calls[0][0]


@pytest.mark.parametrize(
  ("reply", "expected"),
  [
    (improved(" x "), "x"),
    (f"thinking … {improved('x')} done", "x"),
    (improved(f"keep {improved('inner')} whole"), f"keep {improved('inner')} whole"),
    (improved("x") + improved("x"), "x"),
    (improved("{a} <b> \\1"), "{a} <b> \\1"),
  ],
)
def test_replies(reply, expected):
  assert parse_tags(reply, TAGS) == expected


@pytest.mark.parametrize(
  ("reply", "message"),
  [
    ("", "there is no"),
    ("I cannot help with that.", "I cannot help"),
    ("x" * 1_000_000, "there is no"),
    (TAGS[1] + "x" + TAGS[0], "missing"),
    (TAGS[0] + "x", "missing"),
    (improved(""), "empty"),
    (improved(" \n"), "empty"),
    (improved("x") + improved("y"), "2 texts"),
    (improved(f"end with {TAGS[1]} always"), "once too often"),
    (improved("x" * (LONGEST + 1)), "200,001 characters"),
  ],
)
def test_bad_replies_follow_the_policy(reply, message):
  p = parameter()
  with pytest.raises(tg.ReplyError, match=message) as caught:
    tg.TGD([p], engine=answers(reply)).step()
  assert len(str(caught.value)) < 1000
  assert p.value == "be brief"
  assert len(p.gradients) == 1

  tg.TGD([p], engine=answers(reply), on_bad_reply="keep").step()
  assert p.value == "be brief"

  optimizer = tg.TGD([p], engine=answers(reply, improved("better")), on_bad_reply="retry")
  optimizer.step()
  assert p.value == "better"
  assert "could not be used" in optimizer.engine.calls[1][0]


def test_retries_end():
  with pytest.raises(tg.ReplyError):
    tg.TGD([parameter()], engine=answers(*["no"] * 3), on_bad_reply="retry", retries=2).step()


def test_one_bad_reply_of_two_changes_nothing():
  a, b = parameter("a"), parameter("b", role="other prompt")
  with pytest.raises(tg.ReplyError):
    tg.TGD([a, b], engine=answers(improved("x"), "no")).step()
  assert (a.value, b.value) == ("a", "b")


def test_ctrl_c_in_a_step_keeps_text_and_critiques(tmp_path):
  def interrupt(content, system):
    raise KeyboardInterrupt

  p = parameter("be brief", "say why")
  store = tg.GradientStore(str(tmp_path / "store"))
  optimizer = tg.TGD([p], engine=tg.CallableEngine(interrupt), use_gradient_rag=True, gradient_store=store)
  with pytest.raises(KeyboardInterrupt):
    optimizer.step()
  store.close()
  assert p.value == "be brief"
  assert len(p.gradients) == 1
  with tg.GradientStore(str(tmp_path / "store")) as reopened:
    assert [c.text for c in reopened.recent(5, role="system prompt")] == ["say why"]


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"learning_rate": 0}, "learning_rate"),
    ({"learning_rate": 1.5}, "learning_rate"),
    ({"on_bad_reply": "ignore"}, "raise, keep, retry"),
    ({"rag": tg.RagConfig()}, "use_gradient_rag"),
  ],
)
def test_settings_are_checked(options, message):
  with pytest.raises(ValueError, match=message):
    tg.TGD([parameter()], engine=answers(), **options)


def test_images_cannot_be_improved():
  with pytest.raises(TypeError, match="picture"):
    tg.TGD([tg.Variable(b"\x89PNG", requires_grad=False, role_description="picture")], engine=answers())


def test_verbose(capsys):
  tg.TGD([parameter()], 1, answers(improved("be clear"))).step()
  assert "be clear" in capsys.readouterr().out


OLD = "Answer the question in one short sentence and say why you think so"


def test_edit_within_the_budget_is_taken():
  new = OLD.replace("short", "long")
  p = parameter(OLD)
  optimizer = tg.TGD([p], engine=answers(improved(new)), learning_rate=0.2)
  optimizer.step()
  assert p.value == new
  assert "at most 20% of its words" in optimizer.engine.calls[0][0]


def test_edit_beyond_the_budget_is_asked_for_again_then_cut():
  p = parameter(OLD)
  optimizer = tg.TGD([p], engine=answers(*[improved("Never answer. " + OLD[:20])] * 2), learning_rate=0.2, retries=1)
  optimizer.step()
  assert "changed" in optimizer.engine.calls[1][0]
  assert p.value != OLD
  assert changed_share(OLD, p.value) <= 0.2


@pytest.mark.parametrize("budget", [0.05, 0.2, 0.5, 1.0])
@pytest.mark.parametrize(
  "new", ["", "completely other words", OLD + " and be kind", OLD[10:], "Please " + OLD + " now", OLD[::-1], "\n" + OLD]
)
def test_edits_never_exceed_their_budget(new, budget):
  made = limit_edit(OLD, new, budget)
  assert changed_share(OLD, made) <= budget + 1e-9
  assert budget < 1 or made == new


def test_changed_share():
  assert changed_share("", "") == changed_share("a b", "a b") == 0
  assert changed_share("a b", "c d") == 1
  assert changed_share("a b c d", "a b c x") == pytest.approx(0.25)


@pytest.mark.parametrize(
  ("old", "new", "share"),
  [
    ("a b " * 3000, "b a a " * 3100, 1.0),  # 36 million pairs of the same word
    ("a " * 30_000, "a " * 30_100, 100 / 60_100),
    ("keep " + "a b " * 3000 + "this", "keep " + "b a " * 3000 + "this", 0.5),
    ("self . x = y " * 4000 + "end", "self . x = y " * 4000 + "other end", 1 / 40_003),
  ],
)
def test_texts_that_repeat_themselves_are_compared_in_time(old, new, share):
  compared = threading.Thread(target=lambda: found.append(changed_share(old, new)), daemon=True)
  found = []
  compared.start()
  compared.join(20)
  assert found, "still at it after 20 s"
  assert found[0] == pytest.approx(share, abs=0.5 if share >= 0.5 else 1e-6)
  assert changed_share(old, limit_edit(old, new, 0.1)) <= 0.1


@settings(max_examples=200, deadline=None)
@given(st.text("ab \n", max_size=60), st.text("ab \n", max_size=60), st.floats(0, 1))
def test_any_edit_stays_within_its_budget(old, new, budget):
  made = limit_edit(old, new, budget)
  assert limit_edit(old, new, 1.0) == new
  assert limit_edit(old, new, 0.0) == old
  assert 0 <= changed_share(old, new) <= 1
  assert changed_share(old, made) <= budget + 1e-9


class Scored:
  """A score that depends on the texts, and counts how often it was asked for."""

  def __init__(self, parameters, **scores):
    self.parameters, self.scores, self.asked = parameters, scores, 0

  def __call__(self):
    self.asked += 1
    return self.scores["_".join(p.value for p in self.parameters)]


def test_worse_candidate_is_rejected_and_a_better_one_taken():
  p = parameter("old")
  score = Scored([p], old=0.5, worse=0.4, same=0.5, better=0.7)
  engine = answers(*map(improved, ["worse", "same", "better"]))
  optimizer = tg.TGD([p], engine=engine, accept=tg.HeldOut(score))
  (update,) = optimizer.step()
  assert p.value == "old"
  assert not update.verdict.accepted
  assert update.verdict.delta == pytest.approx(-0.1)
  optimizer.step()
  assert p.value == "same"
  (update,) = optimizer.step()
  assert p.value == "better"
  assert update.verdict.delta == pytest.approx(0.2)
  assert score.asked == 4  # each pair of texts once


def test_what_was_taken_and_made_it_worse_has_not_helped():
  p = parameter("old")
  store = tg.GradientStore()
  accept = tg.HeldOut(Scored([p], old=0.5, worse=0.4, better=0.7), tolerance=1.0)
  engine = answers(*map(improved, ["worse", "better"]))
  ids = store.add([tg.Critique(p.role_description, p.get_gradient_text())])
  rag = tg.RagConfig(window=1, k=0)
  optimizer = tg.TGD([p], engine=engine, accept=accept, use_gradient_rag=True, gradient_store=store, rag=rag)
  for value, helped in (("worse", 0), ("better", 1)):
    (update,) = optimizer.step()
    assert (p.value, update.past.ids) == (value, ids)
    (critique,) = store.recent(1, role=p.role_description)
    assert (critique.helped, critique.accepted) == (helped, True)


def test_texts_are_back_when_scoring_fails():
  p = parameter("old")

  def score():
    if p.value == "new":
      raise RuntimeError("no connection")
    return 0.0

  with pytest.raises(RuntimeError, match="no connection"):
    tg.TGD([p], engine=answers(improved("new")), accept=tg.HeldOut(score)).step()
  assert p.value == "old"


def test_pipeline_is_accepted_or_rejected_together():
  a, b = parameter("a"), parameter("b", role="second prompt")
  score = Scored([a, b], a_b=0.5, x_y=0.1)
  tg.TGD([a, b], engine=answers(improved("x"), improved("y")), accept=tg.HeldOut(score)).step()
  assert (a.value, b.value) == ("a", "b")


@pytest.mark.parametrize("option", ["gradient_memory", "momentum_window"])
@pytest.mark.parametrize("policy", ["raise", "retry"])
def test_what_is_shown_of_earlier_steps_leaves_room_for_the_answer(option, policy):
  """Forty steps of long critiques and texts, a context that holds four of them; the last ones are shown."""
  engine = tg.CallableEngine(
    lambda content, system: improved(f"{len(engine.calls)} {'text ' * 300}"), context_tokens=4000, max_tokens=600
  )
  p = tg.Variable("0", role_description="system prompt")
  optimizer = tg.TGD([p], engine=engine, on_bad_reply=policy, **{option: 1000})
  for step in range(40):
    optimizer.zero_grad()
    p.gradients.add(tg.Variable(f"critique {step} {'word ' * 300}", role_description="feedback"))
    optimizer.step()
  last = engine.calls[-1][0]
  assert ("critique 38" if option == "gradient_memory" else ": 38 text") in last
  assert ("critique 1 " if option == "gradient_memory" else ": 1 text") not in last
  assert engine.count_tokens(last) > 2000  # what fits is there


def test_memory_of_the_steps_before_shares_the_budget_of_feedback():
  rag = tg.RagConfig(tokens=500, past_tokens=200)
  engine = tg.CallableEngine(lambda content, system: improved(f"text {len(engine.calls)}"))
  p = tg.Variable("text", role_description="system prompt")
  optimizer = tg.TGD([p], engine=engine, gradient_memory=1000, use_gradient_rag=True, rag=rag)
  for step in range(30):
    optimizer.zero_grad()
    p.gradients.add(tg.Variable(f"critique {step} {'word ' * 20}", role_description="feedback"))
    optimizer.step()
  last = engine.calls[-1][0]
  assert "<FEEDBACK-29> critique 28" in last
  assert rag.count_tokens(last) < 500 + 300  # the prompt itself takes the rest
  assert len(optimizer.state()["memory"][0]) == 30  # all are kept for later


def test_momentum_in_the_order_of_textgrad():
  p, engine = parameter(), answers(improved("v1"), improved("v2"))
  optimizer = tg.TextualGradientDescentwithMomentum(engine, [p], 1, ["be kind"])
  for _ in range(2):
    optimizer.step()
  assert "Version 1: be brief" in engine.calls[1][0]
  assert "Constraint 1: be kind" in engine.calls[1][0]
