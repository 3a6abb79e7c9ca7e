"""Recall by position on real documents: batches change no answer, and a measured curve is not measured again."""

import json

import jax
import jsonschema
import numpy as np
import pytest

from selfrag_jax.experiments import documents
from selfrag_jax.experiments.chat_model import ChatModel
from selfrag_jax.experiments.documents import DocumentsConfig, Experiment, build, conditions, evaluate, make_answer
from selfrag_jax.generate.complete import complete
from selfrag_jax.generate.sampling import SamplingConfig
from selfrag_jax.metrics.answers import substring_match
from selfrag_jax.model.lm import unstack
from selfrag_jax.reports.schema import read_schema
from selfrag_jax.reports.thresholds import numbers
from selfrag_jax.tasks.documents import DocumentQuestion, prompt
from selfrag_jax.text.chat import CHATML, render_for_completion

# a random model says random letters, some of which are right
QUESTIONS = [
  DocumentQuestion(f"Who knows {word}?", tuple("aeiou"[i:]), f"{word} is known", ("nothing here", "nor here", "no"))
  for i, word in enumerate(["zebra", "quartz", "xylem"])
]


@pytest.fixture
def experiment(chatting_model):
  section = DocumentsConfig(n_documents=(2, 4), positions=4, top_k=1, max_new_tokens=6, batch_size=2)
  loaded = ChatModel(chatting_model, "model")
  return Experiment({"model": "tiny", "data": {"path": "there"}}, section, loaded, {"kv": QUESTIONS})


def test_answers_are_those_of_one_prompt_at_a_time(experiment, chatting_model):
  shown = [[question.gold, *question.others][: i + 1] for i, question in enumerate(QUESTIONS)]
  found = make_answer(experiment)(QUESTIONS, shown)
  config, tokenizer = chatting_model.config, chatting_model.tokenizer
  flat = unstack(config, chatting_model.params)
  for (right, length), question, texts in zip(found, QUESTIONS, shown, strict=True):
    chat = {"messages": [{"role": "user", "content": prompt(question, texts)}]}
    ids = render_for_completion(tokenizer, chat, CHATML)
    written = complete(
      config, flat, np.array([ids]), np.array([len(ids)]), jax.random.key(0), max_new_tokens=6,
      sampling=SamplingConfig(temperature=0), stop_ids=(tokenizer.special["<|im_end|>"],),
    )  # fmt: skip
    text = tokenizer.decode(np.asarray(written.tokens)[0, : int(written.lengths[0])], skip_special=True)
    assert (right, length) == (substring_match(text, question.answers), len(ids))


def test_the_memory_shows_what_is_like_the_question_wherever_it_stands(experiment):
  shown = conditions(experiment, QUESTIONS)
  for question in QUESTIONS:
    assert shown["memory"](question, 4, 0) == shown["memory"](question, 4, 3) == [question.gold]
    assert shown["full"](question, 4, 3)[3] == question.gold
    assert shown["gold"](question, 4, 3) == [question.gold]
    assert shown["closed_book"](question, 4, 3) == []


def test_a_run_goes_on_with_what_is_missing(experiment, tmp_path, monkeypatch):
  report = evaluate(experiment, tmp_path)
  assert documents.value_names(experiment) == numbers(report).keys()
  jsonschema.validate(json.loads(json.dumps(report)), read_schema("documents"))
  curves = report["files"]["kv"]
  assert curves.keys() == {"full_2", "full_4", "memory_2", "memory_4", "gold", "closed_book"}
  assert curves["full_4"]["positions"] == [0, 1, 2, 3]
  assert curves["full_4"]["shape"]["n"] == 3
  assert (tmp_path / "documents.png").stat().st_size > 10_000
  assert len((tmp_path / "documents.csv").read_text().splitlines()) == 1 + 2 + 4 + 4
  saved = json.loads((tmp_path / "documents.json").read_text())
  del saved["files"]["kv"]["gold"]
  (tmp_path / "documents.json").write_text(json.dumps(saved))
  measured, measure = [], documents.measure
  monkeypatch.setattr(documents, "measure", lambda *args: measured.append(args[3:]) or measure(*args))
  again = evaluate(experiment, tmp_path)
  assert measured == [(1, [0])]
  without_time = lambda curve: {key: value for key, value in curve.items() if key != "seconds"}
  assert without_time(again["files"]["kv"]["gold"]) == without_time(curves["gold"])
  experiment.config["model"] = "another"
  with pytest.raises(ValueError, match="was measured with another config; use another workdir"):
    evaluate(experiment, tmp_path)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (b"", "documents.json: "),
    (b"[]", "documents.json: a JSON object was expected"),
    ({"config": None}, "was measured with another config"),
    ({"files": 5}, "was damaged; use another workdir"),
    ({"files": {"kv": 5}}, "was damaged; use another workdir"),
    ({"files": {"kv": {"gold": {}}}}, "was damaged; use another workdir"),
  ],
)
def test_measurements_that_were_damaged_are_named(experiment, tmp_path, change, message):
  begun = change if isinstance(change, bytes) else json.dumps({"config": experiment.config, **change}).encode()
  (tmp_path / "documents.json").write_bytes(begun)
  with pytest.raises(ValueError, match=message):
    evaluate(experiment, tmp_path)
  assert (tmp_path / "documents.json").read_bytes() == begun


def test_what_does_not_fit_is_refused(tmp_path):
  config = {"model": "tiny", "data": {"path": ""}, "documents": {"n_documents": (3,)}}
  with pytest.raises(ValueError, match=r"config\.data\.path is empty"):
    build(config)
  record = {"question": "q", "answers": ["a"], "gold": {"title": "", "text": "a"}, "distractors": []}
  (tmp_path / "a.jsonl").write_text(json.dumps(record))
  config["data"]["path"] = str(tmp_path)
  with pytest.raises(ValueError, match=r"a has questions with 1 documents, documents\.n_documents asks for 3"):
    build(config)
  with pytest.raises(ValueError, match=r"config\.documents\.top_k is 0; it must be a whole number, at least 1"):
    build({**config, "documents": {"top_k": 0}})
