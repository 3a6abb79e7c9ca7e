"""The reward model experiment: a run trains on one part, reports on another, and is evaluated again."""

import csv
import json

import jax
import jsonschema
import numpy as np
import pytest

from configs.reward_model import get_config
from selfrag_jax.experiments.reward_model import build, dry_run, evaluate, run, value_names
from selfrag_jax.metrics.statistics import wilson_interval
from selfrag_jax.reports.schema import read_schema
from selfrag_jax.reports.thresholds import numbers
from selfrag_jax.train.load import load_reward_model
from tests.experiments.few_towns import write_llama, write_questions

TINY = {
  "mesh.data": 1, "mesh.fsdp": 8, "model.block_pattern": "MT", "model.n_layers": 2, "model.d_model": 32,
  "model.ssm_head_dim": 16, "model.mlp_dim": 32,
  **{f"{phase}.{key}": value for phase in ("sft", "reward_model") for key, value in (("steps", 2), ("batch_size", 8))},
  "evaluation.periodic": 4, "evaluation.final": 24,
}  # fmt: skip


def made(variant="hybrid", **changes):
  config = get_config(variant)
  config.update_from_flattened_dict((TINY if variant == "hybrid" else {}) | changes)
  return build(config.to_dict())


def test_a_run_reports_what_the_loaded_model_prefers(tmp_path, capsys):
  experiment = made()
  dry_run(experiment)
  said = capsys.readouterr().out
  for line in ("sft update", "reward_model update", "first pair, chosen:", "first pair, rejected, kind "):
    assert line in said
  assert not list(tmp_path.iterdir())
  report = run(experiment, tmp_path)
  jsonschema.validate(json.loads(json.dumps(report)), read_schema("reward_model"))
  assert set(numbers(report)) == value_names(experiment)
  rewards = load_reward_model(tmp_path, tokenizer=experiment.task.tokenizer)
  pairs, kinds = zip(*(experiment.pair("test", i) for i in range(24)), strict=True)
  found = np.asarray(rewards(np.array(pairs).reshape(48, -1), np.full(48, len(pairs[0][0])))).reshape(24, 2)
  assert (found[:, 0] != found[:, 1]).all()
  for kind in ("all", *kinds):
    right = (found[:, 0] > found[:, 1])[[kind in ("all", of) for of in kinds]]
    assert report["accuracy"][kind] == right.mean()
    assert report["accuracy_interval"][kind] == list(wilson_interval(right.sum(), len(right)))
    assert report["pairs"][kind] == len(right)
  odds = np.log(found / (1 - found)).astype(np.float64)
  assert report["loss"] == pytest.approx(np.log1p(np.exp(odds[:, 1] - odds[:, 0])).mean(), abs=1e-4)
  assert report["reward"] == pytest.approx({"chosen": found[:, 0].mean(), "rejected": found[:, 1].mean()}, abs=1e-5)
  assert report["longer"] == 0.5  # all are as long
  with (tmp_path / "reward_model.csv").open() as file:
    assert [row["kind"] for row in csv.DictReader(file)] == list(report["accuracy"])
  before = (tmp_path / "metrics.jsonl").read_text()
  again = evaluate(made(), tmp_path)
  assert {**again, "wall_seconds": 0} == {**report, "wall_seconds": 0}
  assert (tmp_path / "metrics.jsonl").read_text() == before
  with pytest.raises(
    ValueError, match=r"checkpoints/reward_model is at step 2, config\.reward_model\.steps is 3: train"
  ):
    evaluate(made(**{"reward_model.steps": 3}), tmp_path)


def test_without_demonstrations_it_starts_from_scratch():
  experiment = made(**{"sft.steps": 0})
  assert [phase.name for phase in experiment.phases()] == ["reward_model"]


def test_a_pretrained_model_learns_from_passages(tmp_path):
  for name, write in (("questions", write_questions), ("llama", write_llama)):
    (tmp_path / name).mkdir()
    write(tmp_path / name)
  small = {
    "init": str(tmp_path / "llama"), "data.path": str(tmp_path / "questions"), "data.document_tokens": 32,
    "data.prompt_tokens": 64, "data.cloze": 0.0, "pairs.max_hops": 2, "sft.steps": 0, "evaluation.periodic": 2,
    **{f"reward_model.{key}": value for key, value in (("steps", 1), ("accumulate", 1), ("max_tokens", 256))},
  }  # fmt: skip
  with pytest.raises(ValueError, match="among 100 pairs of questions of valid, none has two different answers and"):
    made("smollm2_135m", **small)  # one question is too few
  small |= {"data.parts.train": 0.1, "data.parts.valid": 0.25, "data.parts.test": 0.25}
  experiment = made("smollm2_135m", **small)
  phase = experiment.phase(experiment.base_params)
  embed = lambda params: np.asarray(params["params"]["embed"])
  with jax.set_mesh(experiment.mesh):
    start = jax.device_get(phase.initial_state().params)
  np.testing.assert_array_equal(embed(start["model"]), embed(experiment.base_params))
  report = run(experiment, tmp_path / "run")
  jsonschema.validate(json.loads(json.dumps(report)), read_schema("reward_model"))
  assert set(numbers(report)) == value_names(experiment)
  assert report["pairs"]["all"] == experiment.task.size("test")  # fewer than evaluation.final


def test_mistakes_are_found_before_the_training():
  with pytest.raises(ValueError, match=r"config\.data\.path is empty"):
    made("smollm2_135m")
  with pytest.raises(ValueError, match=r"a conversation of 48 tokens exceeds reward_model\.max_tokens = 40"):
    made(**{"reward_model.max_tokens": 40})
  with pytest.raises(ValueError, match="no variant 'nope'; one of hybrid, transformer, mamba, smollm2_135m"):
    get_config("nope")
