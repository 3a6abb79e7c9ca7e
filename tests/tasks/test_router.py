"""The router: its rules are followed exactly, and its optimizer weighs words by the critiques that it is shown."""

import json

import numpy as np
import pytest

from selfrag_jax.tasks.prompt_tasks import make_task
from selfrag_jax.tasks.router import (
  Router,
  plain,
  read_questions,
  rules,
  split_by_passage,
  words,
)
from selfrag_jax.tasks.rulebook import EMPTY, UNKNOWN, Case

ARTICLES = {"Normans": ("duke rollo settled", "raiders from norway"), "Steam engine": ("boiler pressure", "watt rollo")}


def write_folder(folder, articles=ARTICLES, per_passage=6):
  """Write questions about articles, several to each passage, in the layout of BEIR."""
  folder.mkdir(exist_ok=True)
  corpus, queries, qrels = [], [], ["query-id\tcorpus-id\tscore"]
  for title, passages in articles.items():
    for number, text in enumerate(passages):
      id = f"{title}-{number}"
      corpus.append({"_id": id, "title": title, "text": text})
      for i in range(per_passage):
        queries.append({"_id": f"{id}-{i}", "text": f"what {text} {i}?"})
        qrels.append(f"{id}-{i}\t{id}\t1")
  (folder / "corpus.jsonl").write_text("\n".join(map(json.dumps, corpus)))
  (folder / "queries.jsonl").write_text("\n".join(map(json.dumps, queries)))
  (folder / "qrels.tsv").write_text("\n".join(qrels))
  return folder


def optimize(variable, *now, past=(), capacity=64):
  """Return the rules after critiques (article, words) of this step, and of the past."""
  feedback = "".join(f"<FEEDBACK> {said(*critique)} </FEEDBACK>" for critique in now)
  shown = "".join(
    f'<PAST_FEEDBACK similarity="0.50" count="1" outcome="unknown">{said(*critique)}</PAST_FEEDBACK>'
    for critique in past
  )
  return rules(Router(capacity).optimize(f"<VARIABLE> {variable} </VARIABLE> {feedback} {shown}", None))


def said(label, named):
  return f"This is about {label}; it says {', '.join(named.split())}."


def verdict(question, label, answer=UNKNOWN):
  return f"<OUTPUT_OF_FUNCTION> {question}\nThe right answer is {label}, this was {answer!r}. </OUTPUT_OF_FUNCTION>"


def test_the_model_follows_most_of_the_rules_that_fit():
  prompt = '"rollo" -> Normans; "boiler" -> Steam engine; "watt" -> Steam engine;'
  router = Router()
  assert router.answer("Who was Rollo?", prompt) == "Normans"
  assert router.answer("Did Rollo's boiler please Watt?", prompt) == "Steam engine"
  assert router.answer("Did Rollo have a boiler?", prompt) == "Normans"  # of equals the first
  assert router.answer("Who else?", prompt) == router.answer("Who was Rollo?", EMPTY) == UNKNOWN


def test_the_critic_names_the_article_and_words_of_the_question():
  critique = Router().criticise(verdict("Which dukes of Normandy settled after Rollo?", "Normans"), None)
  assert critique == "This is about Normans; it says normandy, settled, dukes, rollo."
  assert Router().criticise(f"The prompt is used further on. {critique} Improve it.", None) == critique
  with pytest.raises(ValueError, match="no verdict"):
    Router().criticise("something else", None)


def test_a_question_without_telling_words_makes_no_rule():
  critique = Router().criticise(verdict("Who was it?", "Normans"), None)
  assert critique == "This is about Normans; it says nothing."
  reply = Router().optimize(f"<VARIABLE> {EMPTY} </VARIABLE> <FEEDBACK> {critique} </FEEDBACK>", None)
  assert reply == f"<IMPROVED_VARIABLE>{EMPTY}</IMPROVED_VARIABLE>"


def test_alone_a_critique_makes_a_rule_of_the_title_or_the_longest_word():
  assert optimize(EMPTY, ("Normans", "settlement rollo")) == {"settlement": "Normans"}
  assert optimize(EMPTY, ("Steam engine", "settlement steam")) == {"steam": "Steam engine"}


def test_the_past_tells_which_words_will_come_again():
  past = [("Normans", "rollo duke"), ("Steam engine", "settlement watt")]
  assert optimize(EMPTY, ("Normans", "settlement rollo"), past=past)["rollo"] == "Normans"
  assert "settlement" not in optimize(EMPTY, ("Normans", "settlement rollo"), past=past)


def test_words_that_several_articles_share_make_no_rule():
  assert optimize(EMPTY, ("Normans", "rollo"), ("Steam engine", "rollo")) == {}


def test_rules_go_when_they_are_contradicted_and_are_new_when_supported():
  prompt = '"rollo" -> Steam engine; "duke" -> Normans; "watt" -> Steam engine;'
  found = optimize(prompt, ("Normans", "rollo"), past=[("Normans", "duke")])
  assert list(found.items()) == [("watt", "Steam engine"), ("duke", "Normans"), ("rollo", "Normans")]


def test_what_the_past_agrees_on_fills_the_room_that_is_left():
  past = [("Steam engine", "boiler"), ("Steam engine", "boiler"), ("Normans", "duke")]
  assert optimize(EMPTY, ("Normans", "rollo"), past=past) == {"boiler": "Steam engine", "rollo": "Normans"}
  assert optimize(EMPTY, ("Normans", "rollo"), past=past, capacity=1) == {"rollo": "Normans"}


def test_the_oldest_rule_gives_way():
  prompt = '"duke" -> Normans; "watt" -> Steam engine;'
  assert [*optimize(prompt, ("Normans", "rollo"), capacity=2)] == ["watt", "rollo"]


def test_prompts_are_scored_by_the_executor():
  cases = [Case("rollo", 0, "Normans"), Case("watt", 1, "Steam engine")]
  assert Router().score('"rollo" -> Normans;', cases) == 0.5


def test_words_are_those_that_may_tell():
  assert words("What did the Duke's 1066 army_x do with Rollo?") == ["duke", "army_x", "rollo"]
  assert plain('a "b;\n<c>') == "a b c"


def test_questions_have_the_title_of_their_passage(tmp_path):
  found = read_questions(write_folder(tmp_path / "data"))
  assert len(found) == 24
  assert found[0] == ("what duke rollo settled 0?", "Normans", "Normans-0")
  with pytest.raises(ValueError, match="at least two titles"):
    read_questions(write_folder(tmp_path / "one", {"Normans": ("duke",)}))
  with pytest.raises(FileNotFoundError, match=r"corpus\.jsonl"):
    read_questions(tmp_path)


def test_no_passage_is_in_both_parts_and_another_seed_deals_others(tmp_path):
  found = read_questions(write_folder(tmp_path / "data", {name: tuple("abcdefgh") for name in ("One", "Two")}))
  (shown, held_out), again, other = (split_by_passage(found, seed) for seed in (0, 0, 1))
  assert not {q.passage for q in shown} & {q.passage for q in held_out}
  assert sorted([*shown, *held_out]) == sorted(found)
  assert len(shown) == 6 * round(0.6 * 16)
  assert again == (shown, held_out) != other


def test_the_task_keeps_the_passages_of_its_test_out_of_the_steps(tmp_path):
  folder = write_folder(tmp_path / "data", {name: tuple("abcdefgh") for name in ("One", "Two")})
  section = {"name": "router", "path": str(folder), "capacity": 4, "sizes": {"train": 20, "valid": 10, "test": 12}}
  task = make_task(section, 0)
  assert {part: len(found) for part, found in task.parts.items()} == section["sizes"]
  texts = {part: {sample.text for sample in found} for part, found in task.parts.items()}
  passages = {q.text + q.label: q.passage for q in read_questions(folder)}
  of = {part: {passages[s.text + s.target] for s in found} for part, found in task.parts.items()}
  assert not (of["train"] | of["valid"]) & of["test"]
  assert texts["train"]
  with pytest.raises(ValueError, match=r"sizes.*\{'test': 500\} are more than"):
    make_task({**section, "sizes": {**section["sizes"], "test": 500}}, 0)


def test_rules_of_squad_are_learned(shared_data):
  questions = read_questions(shared_data / "ir_squad_dev_half")
  shown, held_out = split_by_passage(questions, 0)
  router, prompt = Router(), EMPTY
  for i in np.random.default_rng(0).permutation(len(shown))[:60]:
    critique = router.criticise(verdict(shown[i].text, shown[i].label), None)
    reply = router.optimize(f"<VARIABLE> {prompt} </VARIABLE> <FEEDBACK> {critique} </FEEDBACK>", None)
    prompt = reply.removeprefix("<IMPROVED_VARIABLE>").removesuffix("</IMPROVED_VARIABLE>")
  assert len(rules(prompt)) > 40
  assert router.score(prompt, [Case(q.text, 0, q.label) for q in held_out]) > 0.1
