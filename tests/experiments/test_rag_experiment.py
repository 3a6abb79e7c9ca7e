"""The RAG experiment: conditions differ in the documents alone; a run trains, reports, and is evaluated again."""

import json

import jsonschema
import numpy as np
import pytest

from configs.rag import get_config
from selfrag_jax.experiments.rag import build, dry_run, evaluate, run, value_names
from selfrag_jax.reports.schema import read_schema
from selfrag_jax.reports.thresholds import numbers
from selfrag_jax.tasks.countries import UNKNOWN, Countries
from selfrag_jax.train.load import load_model

TINY = {
  "mesh.data": 1,
  "mesh.fsdp": 8,
  **{f"{phase}.{key}": value for phase in ("pretrain", "rag") for key, value in (("steps", 2), ("batch_size", 8))},
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


@pytest.mark.parametrize("shown", ["none", "shuffled"])
def test_the_controls_train_on_other_documents(shown):
  plain, control = (made(**{"rag.documents": name}).phase("rag", None).batch(0) for name in ("retrieved", shown))
  assert (plain["tokens"] != control["tokens"]).any()
  if shown == "none":
    assert control["segment_ids"].max() > plain["segment_ids"].max()  # shorter: more fit into a row


def test_the_first_phase_reads_all_and_the_second_answers_alone():
  experiment = made()
  whole, answers = (experiment.phase(name, None).batch(0) for name in ("pretrain", "rag"))
  assert np.array_equal(whole["mask"], whole["segment_ids"] > 0)
  assert 0.05 < answers["mask"].sum() / (answers["segment_ids"] > 0).sum() < 0.15


def test_a_run_reports_and_is_evaluated_again(tmp_path, capsys):
  experiment = made()
  dry_run(experiment)
  assert "first conversation of phase rag" in capsys.readouterr().out
  assert not list(tmp_path.iterdir())
  report = run(experiment, tmp_path)
  jsonschema.validate(json.loads(json.dumps(report)), read_schema("rag"))
  assert set(numbers(report)) == value_names(experiment)
  assert (tmp_path / "rag.csv").read_text().count("\n") == 1 + 2 * len(Countries.conditions)
  with np.load(tmp_path / "rag.npz", allow_pickle=False) as scores:
    assert scores["rag.edited.exact"].mean() == report["em"]["rag"]["edited"]
  again = evaluate(made(), tmp_path)
  assert {**again, "wall_seconds": 0} == {**report, "wall_seconds": 0}


def test_updates_need_a_model_from_the_first_phase_on():
  with pytest.raises(ValueError, match=r"pretrain\.lora\.rank = 4 needs a model to adapt: set config\.init"):
    made(**{"pretrain.lora.rank": 4})


def test_a_run_with_lora_changes_the_projections_alone(tmp_path):
  experiment = made(**{"rag.lora.rank": 4, "evaluation.final": 4})
  dry_run(experiment)
  report = run(experiment, tmp_path)
  assert {**evaluate(experiment, tmp_path), "wall_seconds": 0} == {**report, "wall_seconds": 0}
  before, after = (load_model(tmp_path, phase).params["params"] for phase in ("pretrain", "rag"))
  assert (before["embed"] == after["embed"]).all()
  mixers = [params["segments_0"]["layer_0"]["mixer"]["in_proj"] for params in (before, after)]
  assert not (mixers[0] == mixers[1]).all()
