"""The RAG experiment: conditions differ in the documents alone; a run trains, reports, and is evaluated again."""

import json

import flax.linen as nn
import jax
import jsonschema
import numpy as np
import pytest

from configs.rag import get_config
from selfrag_jax.experiments.chat_model import Answer, ChatModel
from selfrag_jax.experiments.rag import PHASES, build, dry_run, evaluate, run, value_names
from selfrag_jax.experiments.rag_data import PlainConfig, read_plain
from selfrag_jax.model.lm import init_params
from selfrag_jax.reports.schema import read_schema
from selfrag_jax.reports.thresholds import numbers
from selfrag_jax.tasks.countries import Countries
from selfrag_jax.tasks.country_wordings import RELATIONS, UNKNOWN
from selfrag_jax.tasks.facts import FIRST, LAST
from selfrag_jax.text.chat import COMPACT, render_conversation
from selfrag_jax.train.load import load_model

PHASE = {"steps": 2, "batch_size": 8, "accumulate": 1}
TINY = {
  "mesh.data": 1,
  "mesh.fsdp": 8,
  **{f"{phase}.{key}": value for phase in PHASES for key, value in PHASE.items()},
  "model.d_model": 32,
  "model.ssm_head_dim": 16,
  "model.mlp_dim": 32,
  "evaluation.final": 8,
  "evaluation.periodic": 4,
  "evaluation.batch_size": 4,
}


def made(**changes):
  config = get_config("hybrid")
  config.update_from_flattened_dict(TINY | changes)
  return build(config.to_dict())


def documents(row):
  found = [message for message in row["messages"] if message["role"] == "retrieval"]
  return [document for message in found for document in message["documents"]]


def test_conditions_differ_in_the_documents_alone():
  experiment = made()
  rows = {condition: list(experiment.reading.questions("test", 8, condition)) for condition in Countries.conditions}
  for condition, of in rows.items():
    assert [row["messages"][-2] for row in of] == [row["messages"][-2] for row in rows["retrieved"]], condition
    assert [len(documents(row)) for row in of] == [0 if condition == "none" else 5] * 8
  for condition in ("none", "shuffled", "missing"):  # no document answers
    shown = [[document["content"] for document in documents(row)] for row in rows[condition]]
    assert not any(row["gold"] in found for row, found in zip(rows["retrieved"], shown, strict=True)), condition
  assert all(row["answers"] == (UNKNOWN,) for row in rows["missing"])
  pairs = zip(rows["retrieved"], rows["edited"], strict=True)
  assert all(before["answers"] != after["answers"] for before, after in pairs)


@pytest.mark.parametrize("pattern", ["TM", "MMT"])
def test_a_model_from_scratch_has_the_blocks_that_are_asked_for(pattern):
  experiment = made(**{"model.block_pattern": pattern, "model.n_layers": len(pattern)})
  params, found = experiment.phase("rag", None).abstract_state().params["params"], dict.fromkeys("TM", 0)
  for segment in [params[name] for name in params if name.startswith("segments")]:
    for layer in segment.values():
      found["M" if "A_log" in layer["mixer"] else "T"] += len(layer["mixer_norm"]["scale"])
  assert found == {letter: pattern.count(letter) for letter in found}


@pytest.mark.parametrize("shown", ["none", "shuffled"])
def test_the_controls_train_on_other_documents(shown):
  experiments = [made(**{"rag.documents": name, "rag.max_tokens": 384}) for name in ("retrieved", shown)]
  plain, control = (experiment.phase("rag", None).batch(0) for experiment in experiments)
  assert (plain["tokens"] != control["tokens"]).any()
  start = experiments[0].tokenizer.special["[RETRIEVAL_START]"]
  assert (plain["tokens"] == start).sum() == sum(row.max() for row in plain["segment_ids"])  # one a conversation
  if shown == "none":
    assert not (control["tokens"] == start).any()
    assert control["segment_ids"].max() > plain["segment_ids"].max()  # shorter: more fit into a row


def test_the_longest_conversation_of_a_training_fits_into_a_row():
  """One that does not would stop a training at any of its steps."""
  experiment = build(get_config("hybrid").to_dict())
  length = lambda text: len(experiment.tokenizer.encode(text))
  wordings = [wordings[by] for wordings in RELATIONS.values() for by in ("train", "authors")]
  name = f"{FIRST[0]} {LAST[0]}"
  statement = max((text.format(c=name, v=name) for wording in wordings for text in wording.statements), key=length)
  question = max((text.format(c=name) for wording in wordings for text in wording.questions), key=length)
  content = " ".join([statement] * experiment.config["data"]["repeats"])
  messages = [{"role": "retrieval", "documents": [{"title": name, "content": content}] * experiment.reading.top_k}]
  turn = [{"role": "user", "content": question}, {"role": "assistant", "content": max(UNKNOWN, name, key=length)}]
  messages += turn * (1 + experiment.reading.further)
  ids, _ = render_conversation(experiment.tokenizer, {"messages": messages}, COMPACT)
  assert max(length(word) for word in (*FIRST, *LAST)) == 1
  assert len(ids) <= min(getattr(experiment, phase).max_tokens for phase in PHASES)


def test_the_first_phase_reads_all_and_the_others_answers_alone():
  experiment = made()
  whole, choose, rag = (experiment.phase(name, None).batch(0) for name in experiment.phases())
  assert np.array_equal(whole["mask"], whole["segment_ids"] > 0)
  for answers in (choose, rag):
    assert 0.05 < answers["mask"].sum() / (answers["segment_ids"] > 0).sum() < 0.15


@pytest.mark.parametrize(
  ("shares", "changed"), [(("noise", "authors"), ["rag"]), (("near", "reversed", "alike"), ["pretrain", "rag"])]
)
def test_each_phase_reads_its_own_form(shares, changed):
  tokens = lambda experiment, name: experiment.phase(name, None).batch(0)["tokens"]
  varied, plain = made(), made(**{f"data.{share}": 0.0 for share in shares})
  assert [name for name in PHASES if not np.array_equal(tokens(varied, name), tokens(plain, name))] == changed


def test_a_control_sees_in_every_phase_of_answers_what_it_sees_in_the_last(monkeypatch):
  experiment, seen = made(**{"rag.documents": "none"}), []
  training = Countries.training
  monkeypatch.setattr(
    Countries, "training", lambda self, shown, share: seen.append(shown) or training(self, shown, share)
  )
  for name in experiment.phases():
    experiment.phase(name, None)
  assert seen == ["retrieved", "none", "none"]


def test_documents_are_shown_as_often_as_the_config_says(monkeypatch):
  once, twice = (made(**{"data.repeats": n, **{f"{p}.max_tokens": 384 for p in PHASES}}) for n in (1, 2))
  for phase in once.phases():
    lengths = [(of.phase(phase, None).batch(0)["segment_ids"] > 0).sum() for of in (once, twice)]
    assert lengths[0] < lengths[1]
  asked = []
  monkeypatch.setattr(ChatModel, "answer", lambda self, messages, **_: asked.append(messages) or [Answer("", 0, 0)] * 4)
  for experiment in (once, twice):
    experiment.score(nn.unbox(init_params(experiment.model, jax.random.key(0))), "test", 4, "retrieved")
  for before, after in zip(*asked, strict=True):
    assert [f"{one['content']} {one['content']}" for one in before[0]["documents"]] == [
      one["content"] for one in after[0]["documents"]
    ]
    assert before[1:] == after[1:]


def test_a_run_reports_and_is_evaluated_again(tmp_path, capsys):
  experiment = made()
  dry_run(experiment)
  assert "first conversation of phase rag" in capsys.readouterr().out
  assert not list(tmp_path.iterdir())
  report = run(experiment, tmp_path)
  jsonschema.validate(json.loads(json.dumps(report)), read_schema("rag"))
  assert set(numbers(report)) == value_names(experiment)
  assert (tmp_path / "rag.csv").read_text().count("\n") == 1 + 3 * len(Countries.conditions)
  with np.load(tmp_path / "rag.npz", allow_pickle=False) as scores:
    assert scores["rag.edited.exact"].mean() == report["em"]["rag"]["edited"]
  again = evaluate(made(), tmp_path)
  assert {**again, "wall_seconds": 0} == {**report, "wall_seconds": 0}


def test_plain_conversations_need_questions_of_files_and_their_own_files(tmp_path):
  with pytest.raises(ValueError, match=r"rag\.plain\.share = 0\.2 is for questions of files"):
    made(**{"rag.plain.share": 0.2})
  with pytest.raises(ValueError, match=r"needs the files of gsm8k: set rag\.plain\.path"):
    read_plain(PlainConfig(share=0.2, data_set="gsm8k"), is_of_files=True)
  (tmp_path / "train.jsonl").write_text('{"question": "What is 1 + 1?", "answer": "It is 2.\\n#### 2"}\n')
  plain = read_plain(PlainConfig(share=0.2, data_set="gsm8k", path=str(tmp_path)), is_of_files=True)
  assert len(plain) == 1
  assert read_plain(PlainConfig(), is_of_files=False) is None


def test_some_conditions_are_enough(tmp_path):
  changes = {"evaluation.conditions": "retrieved, none", "evaluation.final": 4}
  report = run(experiment := made(**changes), tmp_path)
  assert list(report["em"]["rag"]) == ["retrieved", "none"]
  assert set(numbers(report)) == value_names(experiment)
  with pytest.raises(ValueError, match=r"config\.evaluation\.conditions has 'retreived'; did you mean retrieved\?"):
    made(**{"evaluation.conditions": "retreived"})


def test_updates_need_a_model_from_the_first_phase_on():
  with pytest.raises(ValueError, match=r"pretrain\.lora\.rank = 4 needs a model to adapt: set config\.init"):
    made(**{"pretrain.lora.rank": 4})


def test_a_run_with_lora_changes_the_projections_alone(tmp_path):
  experiment = made(**{"rag.lora.rank": 4, "evaluation.final": 4})
  dry_run(experiment)
  report = run(experiment, tmp_path)
  assert {**evaluate(experiment, tmp_path), "wall_seconds": 0} == {**report, "wall_seconds": 0}
  before, after = (load_model(tmp_path, phase).params["params"] for phase in ("choose", "rag"))
  assert (before["embed"] == after["embed"]).all()
  mixers = [params["segments_0"]["layer_0"]["mixer"]["in_proj"] for params in (before, after)]
  assert not (mixers[0] == mixers[1]).all()


def test_a_run_from_scratch_is_no_start_for_another_tokenizer(tmp_path):
  run(made(**{"evaluation.final": 4}), tmp_path)
  with pytest.raises(ValueError, match=r"holds no tokenizer: put its tokenizer\.json beside"):
    made(init=str(tmp_path))
