"""The Latent Rulebook: its three models act on the text of their prompts alone."""

import numpy as np
import pytest

import selfrag_jax.textgrad as tg
from selfrag_jax.tasks.rulebook import EMPTY, FINE, NOTES, ROLE, TOPIC_ROLE, UNKNOWN, Rulebook, RulebookPipeline, rules


def optimize(book, variable, feedback):
  reply = book.optimize(f"<VARIABLE> {variable} </VARIABLE> {feedback}", None)
  return rules(reply)


def said(book, topic, action=None):
  return f"Cases of {book.names[topic]} call for {action or book.actions[topic]}."


def past(text, count=1):
  return f'<PAST_FEEDBACK similarity="0.50" count="{count}" outcome="unknown">{text}</PAST_FEEDBACK>'


def test_the_same_seed_is_the_same_book():
  a, b, c = (Rulebook(seed=seed) for seed in (1, 1, 2))
  assert (a.names, a.actions) == (b.names, b.actions) != (c.names, c.actions)
  assert len(set(a.names)) == 60


def test_cases_show_their_topic_and_not_its_name():
  book = Rulebook()
  for case in book.cases(np.random.default_rng(0), [3, 7], 50):
    assert case.topic in (3, 7)
    assert book.topic_of(case.text) == case.topic
    assert book.names[case.topic].lower() not in case.text
  with pytest.raises(ValueError, match="no word of a topic"):
    book.topic_of("nothing known")


def test_the_model_follows_its_prompt():
  book = Rulebook()
  (case,) = book.cases(np.random.default_rng(0), [5], 1)
  right = f"For {book.names[5]}: {case.action}."
  assert book.answer(case.text, right) == case.action
  assert book.answer(case.text, EMPTY) == UNKNOWN
  assert (book.score(right, [case]), book.score(EMPTY, [case])) == (1.0, 0.0)


def test_the_critic_errs_as_often_as_it_should():
  book = Rulebook(noise=0.3)
  cases = book.cases(np.random.default_rng(0), range(60), 2000)
  right = np.mean([book.criticise(case.text, None) == said(book, case.topic) for case in cases])
  assert right == pytest.approx(0.7, abs=0.04)


def test_the_optimizer_follows_most_of_the_feedback():
  book = Rulebook(capacity=2)
  a, b, c = book.names[:3]
  assert optimize(book, EMPTY, said(book, 0, "x")) == {a: "x"}
  feedback = said(book, 0, "x") + past(said(book, 0, "y"), count=3) + past(said(book, 1, "z"))
  assert optimize(book, EMPTY, feedback) == {b: "z", a: "y"}
  # what works stays as long as there is room; a rule that has just failed is not written again
  assert optimize(book, f"For {b}: z.", said(book, 0, "x")) == {b: "z", a: "x"}
  assert optimize(book, f"For {b}: z.", said(book, 0, "x") + past(said(book, 1, "w"))) == {b: "z", a: "x"}
  assert optimize(book, f"For {b}: z. For {c}: v.", said(book, 0, "x")) == {c: "v", a: "x"}
  assert optimize(book, f"For {a}: y.", said(book, 0, "x") + past(said(book, 0, "y"), count=9)) == {a: "x"}


def test_the_optimizer_of_the_package_learns_it():
  """The chain through real prompts: model, judge, critic and optimizer, with nothing but text between them."""
  book, rng = Rulebook(n_topics=4, noise=0.0), np.random.default_rng(1)
  prompt = tg.Variable(EMPTY, role_description=ROLE)
  model = tg.BlackboxLLM(tg.CallableEngine(book.answer), prompt)

  def engine(content, system):
    return book.optimize(content, system) if "optimizer inside" in system else book.criticise(content, system)

  with tg.backward_engine(tg.CallableEngine(engine, concurrency=1)):
    optimizer = tg.TGD([prompt], use_gradient_rag=True)
    for _ in range(12):
      losses = []
      for case in book.cases(rng, range(4), 2):
        answer = model(tg.Variable(case.text, requires_grad=False, role_description="case"))
        if answer.value != case.action:
          judge = tg.StringBasedFunction(lambda answer, case=case: f"wrong: {case.text}", "compares")
          losses.append(judge({"answer": answer}))
      if losses:
        optimizer.zero_grad()
        tg.sum(losses).backward()
        optimizer.step()
  assert book.score(prompt.value, book.cases(rng, range(4), 40)) == 1.0


def test_the_optimizer_reads_a_long_prompt_where_it_is_whole():
  book = Rulebook(capacity=60)
  held = {name: "x" for name in book.names[:30]}
  whole = " ".join(f"For {name}: {action}." for name, action in held.items())
  words = whole.split()
  ends = " ".join(words[:10]) + " (...) " + " ".join(words[-10:])
  used = f"<LM_SYSTEM_PROMPT> {whole} </LM_SYSTEM_PROMPT>"
  assert optimize(book, ends, used + said(book, 40, "y")) == {**held, book.names[40]: "y"}


def test_the_pipeline_leads_from_words_to_topics_to_actions():
  book = RulebookPipeline(n_topics=4, noise=0.0)
  (case,) = book.cases(np.random.default_rng(0), [2], 1)
  name, word = book.names[2], next(w for w in case.text.split() if w in book._words[2])
  first, second = f"For {word}: {name}.", f"For {name}: {case.action}."
  assert book.answer(case.text, first) == name
  assert book.answer(case.text + NOTES + name, second) == case.action
  assert book.answer(case.text, EMPTY) == book.answer(case.text + NOTES + UNKNOWN, second) == UNKNOWN

  others = " ".join(f"For {w}: {book.names[1]}." for w in book._words[1])  # what a prompt says is not what a case is

  def said(role, case, answer):
    return book.criticise(
      f"<ROLE> {role} </ROLE> <LM_SYSTEM_PROMPT> {others} </LM_SYSTEM_PROMPT>\n\n"
      f"<LM_INPUT> {case} </LM_INPUT>\n\n<LM_OUTPUT> {answer} </LM_OUTPUT>",
      None,
    )

  assert said(TOPIC_ROLE, case.text, UNKNOWN) == f"Cases of {word} call for {name}."
  assert said(TOPIC_ROLE, case.text, name) == FINE
  assert said(ROLE, case.text + NOTES + name, UNKNOWN) == f"Cases of {name} call for {case.action}."
  assert said(ROLE, case.text + NOTES + book.names[1], UNKNOWN) == FINE
  assert said("notes", case.text, UNKNOWN) == f"It is about {name}."
