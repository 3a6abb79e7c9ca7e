"""Question answering: arms show different passages, prompts fit, and a run reports every arm."""

import json

import jsonschema
import numpy as np
import pytest

from configs.qa import get_config
from selfrag_jax.experiments import chat_model
from selfrag_jax.experiments.qa import (
  ask,
  build,
  conversation,
  dry_run,
  evaluate,
  find,
  fitting,
  value_names,
)
from selfrag_jax.reports.schema import read_schema
from selfrag_jax.reports.thresholds import numbers

MAYORS = {"Avila": "Ada", "Bergen": "Bo", "Cadiz": "Cy", "Dover": "Di", "Evora": "Ed"}
TEXTS = {town: f"The mayor of {town} is {name}." for town, name in MAYORS.items()}


@pytest.fixture
def folder(tmp_path):
  """Questions of SQuAD 2.0 about five towns; two of them have no answer."""
  articles = [
    {
      "title": title,
      "paragraphs": [
        {
          "context": text,
          "qas": [
            {"id": f"{title} yes", "question": f"Who is the mayor of {title}?", "is_impossible": False,
             "answers": [{"text": text.split()[-1][:-1], "answer_start": 0}]},
            *([{"id": f"{title} no", "question": f"Who was the mayor of {title} before?", "is_impossible": True,
                "answers": []}] if title < "C" else []),
          ],
        }
      ],
    }
    for title, text in TEXTS.items()
  ]  # fmt: skip
  (tmp_path / "dev-v2.0.json").write_text(json.dumps({"version": "v2.0", "data": articles}))
  return tmp_path


@pytest.fixture
def made(folder, chatting_model, monkeypatch):
  monkeypatch.setattr(chat_model, "load_model", lambda source, phase=None, mesh=None: chatting_model)

  def make(**changes):
    config = get_config("squad")
    small = {"data.path": str(folder), "model": "tiny", "qa.max_new_tokens": 4, "qa.top_k": 2}
    config.update_from_flattened_dict(small | changes)
    return build(config.to_dict())

  return make


def test_a_run_reports_every_arm(made, tmp_path, capsys):
  experiment = made()
  dry_run(experiment)
  assert "7 of 7 questions have all gold passages" in capsys.readouterr().out
  (tmp_path / "out").mkdir()
  report = evaluate(experiment, tmp_path / "out")
  jsonschema.validate(json.loads(json.dumps(report)), read_schema("qa"))
  assert set(numbers(report)) <= value_names(experiment)
  assert (report["questions"], report["with_answer"]) == (7, 5)
  assert set(report["arms"]) == {"none", "bm25", "bm25_twice", "gold"}
  none, bm25, twice, gold = (report["arms"][name] for name in ("none", "bm25", "bm25_twice", "gold"))
  assert "recall" not in none
  assert (none["searches"], gold["searches"], bm25["searches"]) == (0, 0, 1)
  assert 1 <= twice["searches"] <= 2
  assert gold["recall"] == gold["precision"] == bm25["all_gold"] == 1.0
  assert bm25["precision"] == 0.5
  assert bm25["prompt_tokens"] > gold["prompt_tokens"] > none["prompt_tokens"]
  assert (tmp_path / "out" / "qa.png").read_bytes().startswith(b"\x89PNG")
  assert (tmp_path / "out" / "qa.csv").read_text().count("\n") == 5
  with np.load(tmp_path / "out" / "qa.npz", allow_pickle=False) as rows:
    assert rows["bm25.em"].shape == (7,)
    assert rows["bm25.has_answer"].sum() == 5


def test_answers_are_scored_and_compared(made, monkeypatch):
  """A model that reads aloud is right where the passage is shown."""
  experiment = made()

  def read_aloud(prompts, **_):
    said = []
    for [message] in prompts:
      found = [text for text in TEXTS.values() if text in message["content"]]
      said.append(chat_model.Answer(found[0].split()[-1] if found else "I don't know.", 9, 3))
    return said

  monkeypatch.setattr(experiment.chat, "answer", read_aloud)
  rows = {name: ask(experiment, find(experiment, name, arm)) for name, arm in experiment.arms.items()}
  has_answer = rows["gold"]["has_answer"] > 0
  assert rows["gold"]["em"][has_answer].tolist() == [1.0] * 5
  assert rows["gold"]["em"][~has_answer].tolist() == [0.0] * 2
  assert rows["none"]["em"].tolist() == (~has_answer).astype(float).tolist()
  assert rows["none"]["abstained"].all()


def test_passages_that_do_not_fit_are_left_out_from_the_end(made):
  experiment = made()
  [example] = [e for e in experiment.examples if e["id"] == "Dover yes"]
  found = find(experiment, "bm25", experiment.arms["bm25"])[experiment.examples.index(example)]
  count = lambda some: experiment.chat.count(conversation(example, some, experiment.settings))
  assert fitting(found.passages, count, count(found.passages)) == found.passages
  assert fitting(found.passages, count, count(found.passages) - 1) == found.passages[:1]
  assert fitting(found.passages, count, count([])) == []
  with pytest.raises(ValueError, match=rf"without any passage has {count([])} tokens, more than the 3 of a prompt"):
    fitting(found.passages, count, 3)
  tight = made(**{"qa.max_tokens": count(found.passages[:1]) + 4})
  rows = ask(tight, find(tight, "bm25", tight.arms["bm25"]))
  assert rows["left_out"].min() == 1
  assert rows["recall"][rows["left_out"] == 1].tolist() == [1.0] * int((rows["left_out"] == 1).sum())
  assert (rows["recall"][rows["left_out"] == 2] == 0).all()  # nothing was shown


def test_a_model_of_ours_reads_passages_in_their_own_turn(made):
  experiment = made(**{"qa.as_text": False, "qa.cite": True})
  messages = conversation(experiment.examples[0], [("Avila", "A text.")], experiment.settings)
  assert [message["role"] for message in messages] == ["system", "retrieval", "user"]
  assert "cite them, as in [1]" in messages[0]["content"]
  assert messages[1]["documents"] == [{"title": "Avila", "content": "A text."}]
  assert experiment.chat.count(messages) > 0


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"baseline": "bm52"}, "config.baseline is 'bm52'; one of bm25, bm25_twice, gold, none"),
    ({"arms.bm25.type": "bm52"}, "bm52"),
    ({"arms.bm25.k9": 1.0}, "config.arms.bm25: the settings of bm25 do not fit"),
    ({"arms.gold.k1": 1.0}, "config.arms.gold shows gold: it has no further settings, here k1"),
    ({"data.path": ""}, "config.data.path is empty"),
    ({"data.split": "test"}, "has no split 'test'"),
    ({"data.data_set": "gsm8k"}, "gsm8k"),
  ],
)
def test_what_cannot_be_asked_is_an_error(made, changes, message):
  with pytest.raises((ValueError, FileNotFoundError), match=message):
    made(**changes)
