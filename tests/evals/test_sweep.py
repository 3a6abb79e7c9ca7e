"""The sweep: runs that are done are read, the others are made, and seeds are summarised."""

import csv
import json

import pytest

from configs.position_recall import get_config
from selfrag_jax.evals import position_recall, sweep
from selfrag_jax.tasks.facts import WORDINGS


def report(variant, seed, worst):
  curve = {"accuracy": 0.9, "worst": worst, "u": 0.0, "range_upper": 0.05}
  names = ("memory", "head_tail", "full_hybrid")
  checks = {"worst": {"holds": worst >= 0.85}, "flat": {"holds": True}}
  return {"variant": variant, "seed": seed, "conditions": dict.fromkeys(names, curve), "checks": checks}


def test_only_what_is_missing_is_run(tmp_path, monkeypatch, capsys):
  runs = {f"{variant}_seed{seed}": (variant, seed) for variant in ("kv", "needle") for seed in range(2)}
  (tmp_path / "kv_seed0").mkdir()
  (tmp_path / "kv_seed0" / "position_recall.json").write_text(json.dumps(report("kv", 0, 0.95)))
  made = []

  def run(experiment, workdir):
    made.append(workdir.name)
    (workdir / "position_recall.json").write_text(json.dumps(report(*experiment, worst=0.8)))

  monkeypatch.setattr(position_recall, "run", run)
  summary = sweep.run(runs, tmp_path)
  assert made == ["kv_seed1", "needle_seed0", "needle_seed1"]
  assert summary["kv"]["seeds"] == 2
  assert summary["kv"]["conditions"]["memory"]["worst"] == pytest.approx({"mean": 0.875, "low": 0.8, "high": 0.95})
  assert summary["kv"]["checks_held"] == {"worst": 1, "flat": 2}
  assert summary["needle"]["checks_held"] == {"worst": 0, "flat": 2}
  assert "3 of 4" in capsys.readouterr().out
  with (tmp_path / "position_recall.csv").open() as file:
    assert {(row["variant"], row["condition"]) for row in csv.DictReader(file)} == {
      (variant, name) for variant in ("kv", "needle") for name in ("memory", "head_tail", "full_hybrid")
    }
  made.clear()
  assert sweep.run(runs, tmp_path) == summary
  assert made == []


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff", b'{"variant": "kv", "conditions": 5, "checks": {}}'])
def test_a_damaged_report_of_a_run_is_named(tmp_path, content):
  (tmp_path / "one").mkdir()
  (tmp_path / "one" / "position_recall.json").write_bytes(content)
  with pytest.raises(ValueError, match=r"one/position_recall\.json"):
    sweep.run({"one": None}, tmp_path)


def test_seeds_whose_checks_have_other_names_are_summarised():
  one, other = report("kv", 0, 0.95), report("kv", 1, 0.8)
  other["checks"]["later"] = other["checks"].pop("flat")
  assert sweep.summarize({"a": one, "b": other})["kv"]["checks_held"] == {"worst": 1, "flat": 1, "later": 1}


def test_the_config_has_every_variant_with_three_seeds():
  runs = get_config("full").runs
  assert {(run.data.variant, run.seed) for run in runs.values()} == {(v, s) for v in WORDINGS for s in range(3)}
  assert all(run.data.seed == run.seed for run in runs.values())
