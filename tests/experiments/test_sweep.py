"""The sweep: finished runs are read, missing runs are made, and seeds are summarised."""

import csv
import json

import jsonschema
import numpy as np
import pytest

from configs import headlines
from selfrag_jax.experiments import position_recall, refrag, rerank, sweep
from selfrag_jax.experiments.self_rag import NotLearnedError
from selfrag_jax.reports.schema import read_schema
from selfrag_jax.reports.thresholds import numbers
from selfrag_jax.tasks.facts import WORDINGS

KINDS = sweep.KINDS


def recall_report(seed, worst):
  curve = {"accuracy": 0.9, "worst": worst, "u": 0.0, "range_upper": 0.05, "budget": 16}
  curve["accuracy_by_depth"] = [0.9, worst]
  checks = {"worst": {"holds": worst >= 0.85}, "flat": {"holds": True}}
  conditions = dict.fromkeys(("memory", "head_tail", "full_hybrid"), curve)
  facts = {"seed": seed, "variant": "kv", "n_facts": [64], "depths": {"64": [0, 63]}, "chance": 0.02}
  return {**facts, "conditions": conditions, "checks": checks, "wall_seconds": 5.0}


def search_report(em):
  return {"em": {"refrag": em, "sft": 0.05}, "f1": {"refrag": em}, "wall_seconds": 3.0, "chance": 0.03}


@pytest.fixture
def runs(tmp_path, monkeypatch):
  """Two groups, of which a run is done, and a list of the runs that are made."""
  made = []

  def run_recall(seed, workdir):
    made.append(str(workdir.relative_to(tmp_path)))
    if seed == 3:
      raise NotLearnedError("phase pretrain ended after 5 steps with a validation loss of 2")
    (workdir / "position_recall.json").write_text(json.dumps(recall_report(seed, worst=0.8)))

  def run_search(em, workdir):
    made.append(str(workdir.relative_to(tmp_path)))
    (workdir / "report.json").write_text(json.dumps(search_report(em)))

  monkeypatch.setattr(position_recall, "evaluate", run_recall)
  monkeypatch.setattr(refrag, "run", run_search)
  (tmp_path / "kv" / "seed0").mkdir(parents=True)
  (tmp_path / "kv" / "seed0" / "position_recall.json").write_text(json.dumps(recall_report(0, 0.95)))
  recall, search = KINDS["position_recall"], KINDS["refrag"]
  groups = {
    "kv": {f"seed{i}": sweep.Run(recall, i, {"seed": i}) for i in range(4)},
    "hops": {f"seed{i}": sweep.Run(search, em, {}) for i, em in enumerate((0.5, 1.0, 0.9))},
  }
  return groups, made


def test_only_what_is_missing_is_run_and_a_run_that_fails_stops_no_other(runs, tmp_path, capsys):
  groups, made = runs
  summary = sweep.evaluate(groups, tmp_path)
  assert made == ["kv/seed1", "kv/seed2", "kv/seed3", "hops/seed0", "hops/seed1", "hops/seed2"]
  kv, hops = summary["kv"], summary["hops"]
  assert (kv["runs"], kv["not_learned"], hops["runs"], hops["not_learned"]) == (3, 1, 3, 0)
  worst = kv["values"]["conditions.memory.worst"]
  assert (worst["median"], worst["low"], worst["high"], worst["runs"]) == (0.8, 0.8, 0.95, 3)
  assert worst["of_runs"] == [["seed0", 0.95], ["seed1", 0.8], ["seed2", 0.8]]
  assert kv["checks"] == {"held": 4, "of": 6, "failed": [["seed1", "worst"], ["seed2", "worst"]]}
  assert hops["values"]["em.refrag"] == {
    "runs": 3, "median": 0.9, "low": 0.5, "high": 1.0, "of_runs": [["seed0", 0.5], ["seed1", 1.0], ["seed2", 0.9]],
  }  # fmt: skip
  assert "f1.refrag" not in hops["values"]
  out = capsys.readouterr().out
  assert "run 2 of 7: kv/seed1" in out
  assert "kv: 3 runs, 1 ended without what their next phase needs, 4 of 6 checks hold" in out
  assert "seed3: phase pretrain ended after 5 steps" in out
  assert "refrag                    0.900  [0.500, 1.000]  3 runs" in out
  with (tmp_path / "sweep.csv").open() as file:
    rows = {(row["group"], row["number"]): row for row in csv.DictReader(file)}
  assert rows["hops", "em.refrag"]["median"] == "0.9000"
  for name in ("sweep.png", "kv.png"):
    assert (tmp_path / name).stat().st_size > 5_000
  assert not (tmp_path / "hops.png").exists()  # nothing is drawn over depth
  assert json.loads((tmp_path / "sweep.json").read_text()) == summary
  jsonschema.validate(summary, read_schema("sweep"))
  made.clear()
  assert sweep.evaluate(groups, tmp_path) == summary
  assert made == ["kv/seed3"]  # it may have got more steps
  capsys.readouterr()
  assert sweep.publish(tmp_path, *sweep.read_done(tmp_path)) == summary  # the run that ended is not forgotten
  assert "seed3: phase pretrain ended after 5 steps" in capsys.readouterr().out


NUMBERS = [b'{"conditions": {"memory": {"worst": %b}}}' % number for number in (b"NaN", b"1e999", b"9" * 400)]


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff", b'{"conditions": 5, "checks": {}}', *NUMBERS])
def test_a_damaged_report_of_a_run_is_named_before_others_run(runs, tmp_path, content):
  (tmp_path / "kv" / "seed0").rename(tmp_path / "kv" / "seed2")
  (tmp_path / "kv" / "seed2" / "position_recall.json").write_bytes(content)
  with pytest.raises(ValueError, match=r"seed2/position_recall\.json is no report .* delete it to make the run again"):
    sweep.evaluate(runs[0], tmp_path)
  assert runs[1] == []


def test_the_report_of_another_config_is_not_taken(runs, tmp_path):
  groups, made = runs
  written = tmp_path / "kv" / "seed0" / "config.json"
  written.write_text(json.dumps({"seed": 0}))
  sweep.evaluate({"kv": {"seed0": groups["kv"]["seed0"]}}, tmp_path)
  written.write_text(json.dumps({"seed": 77}))
  with pytest.raises(ValueError, match=r"seed0/position_recall\.json is of another config"):
    sweep.evaluate(groups, tmp_path)
  assert made == []


@pytest.mark.parametrize(
  ("changes", "message"),
  [({"seed": 0}, "two runs of the seed 0"), ({"seed": 5, "variant": "sentence"}, "differ in variant")],
)
def test_a_report_that_does_not_belong_to_its_group_is_refused(runs, tmp_path, changes, message):
  (tmp_path / "kv" / "seed5").mkdir()
  report = {**recall_report(5, 0.9), **changes}
  (tmp_path / "kv" / "seed5" / "position_recall.json").write_text(json.dumps(report))
  with pytest.raises(ValueError, match=message):
    sweep.publish(tmp_path, *sweep.read_done(tmp_path))


def test_curves_of_other_lengths_are_refused(runs, tmp_path):
  (tmp_path / "kv" / "seed5").mkdir()
  report = recall_report(5, 0.9)
  report["conditions"]["memory"]["accuracy_by_depth"] = [0.5, 0.5, 0.5]
  (tmp_path / "kv" / "seed5" / "position_recall.json").write_text(json.dumps(report))
  with pytest.raises(ValueError, match="kv: these reports cannot be drawn together"):
    sweep.publish(tmp_path, *sweep.read_done(tmp_path))


def test_runs_that_measure_different_things_are_summarised():
  one, other = recall_report(0, 0.95), recall_report(1, 0.8)
  other["checks"]["later"] = other["checks"].pop("flat")
  del other["conditions"]["full_hybrid"]
  found = sweep.summarize({"a": one, "b": other}, KINDS["position_recall"])
  assert found["checks"] == {"held": 3, "of": 4, "failed": [["b", "worst"]]}
  assert found["values"]["conditions.full_hybrid.accuracy"]["runs"] == 1
  assert found["values"]["conditions.memory.accuracy"]["runs"] == 2


def test_rerankers_have_intervals_over_runs_and_questions(tmp_path, monkeypatch, capsys):
  rng, made = np.random.default_rng(0), []

  def run_rerank(shift, workdir):
    made.append(shift)
    plain = rng.random(50)
    arrays = {"bm25.ndcg@10": plain, "blended.ndcg@10": plain + 0.1, "reranked.ndcg@10": plain + shift}
    np.savez(workdir / "rerank.npz", **arrays)
    (workdir / "rerank.json").write_text(json.dumps({name: float(x.mean()) for name, x in arrays.items()}))

  monkeypatch.setattr(rerank, "run", run_rerank)
  groups = {"rerank": {f"seed{i}": sweep.Run(KINDS["rerank"], shift, {}) for i, shift in enumerate((0.2, 0.4, 0.0))}}
  pairs = sweep.evaluate(groups, tmp_path)["rerank"]["paired"]
  assert sweep.evaluate(groups, tmp_path)["rerank"]["paired"] == pairs
  assert made == [0.2, 0.4, 0.0]
  assert pairs["blended.ndcg@10 - bm25.ndcg@10"]["interval"] == pytest.approx([0.1, 0.1])
  between = pairs["reranked.ndcg@10 - bm25.ndcg@10"]
  assert (between["runs"], between["questions"]) == (3, 50)
  assert between["difference"] == pytest.approx(0.2)
  low, high = between["interval"]
  assert low < 0.1
  assert high > 0.3
  assert "over 3 runs and 50 questions together" in capsys.readouterr().out
  np.savez(tmp_path / "rerank" / "seed1" / "rerank.npz", **dict.fromkeys(KINDS["rerank"].paired[0], np.zeros(3)),
    **{"reranked.ndcg@10": np.zeros(3)})  # fmt: skip
  with pytest.raises(ValueError, match="seed0, seed1, seed2 were asked different questions"):
    sweep.evaluate(groups, tmp_path)
  (tmp_path / "rerank" / "seed1" / "rerank.npz").write_bytes(b"PK")
  with pytest.raises(ValueError, match=r"seed1/rerank\.json is no report of a run"):
    sweep.evaluate(groups, tmp_path)


def test_the_folder_of_files_is_that_of_all_runs_without_one(monkeypatch):
  seen = []
  monkeypatch.setattr(rerank, "build", seen.append)
  sweep.build({**headlines.get_config("rerank").to_dict(), "data": {"path": "folder"}})
  assert [(run["seed"], run["data"]["path"], run["data"]["seed"]) for run in seen] == [
    (i, "folder", 0) for i in range(3)
  ]


def test_a_run_of_an_unknown_experiment_is_named():
  with pytest.raises(ValueError, match=r"config.runs.kv.seed0.experiment is 'x'; one of position_recall, refrag"):
    sweep.build({"runs": {"kv": {"seed0": {"experiment": "x", "data": {}}}}})


def test_the_names_of_a_search_run_are_known_before():
  config = headlines.get_config().to_dict()["runs"]["refrag_hybrid"]
  name, run = next(iter(config.items()))
  groups = sweep.build({"runs": {"hops": {name: run}}})
  em = {f"em.{name}": 0.5 for name in ("closed_book", "one_search", "sft", "sft_gold", "refrag", "oracle")}
  report = {"em": {name.split(".")[1]: value for name, value in em.items()}, "wall_seconds": 2.0}
  known = numbers({"hops": sweep.summarize({name: report}, KINDS["refrag"])}).keys()
  assert sweep.value_names(groups) == known


def test_the_config_has_fresh_seeds_for_every_headline():
  groups = headlines.get_config().to_dict()["runs"]
  seeds = lambda group: [run["seed"] for run in groups[group].values()]
  assert seeds("position_recall_kv") == list(range(10, 20))
  assert seeds("refrag_hybrid") == list(range(20, 30))
  assert {f"position_recall_{variant}" for variant in WORDINGS} < groups.keys()
  assert all(run["data"]["seed"] == run["seed"] for runs in groups.values() for run in runs.values())
  assert min(run["seed"] for runs in groups.values() for run in runs.values()) >= 10  # those below served for tuning


def test_one_group_can_be_run_alone():
  both = headlines.get_config().to_dict()["runs"]
  assert headlines.get_config("refrag_mamba").to_dict()["runs"] == {"refrag_mamba": both["refrag_mamba"]}
  with pytest.raises(ValueError, match=r"has the variants all, position_recall, refrag, .*refrag_mamba.*, not 'mamba'"):
    headlines.get_config("mamba")


def test_what_is_done_is_summarised_without_a_run(runs, tmp_path):
  _, made = runs
  (tmp_path / "hops" / "seed1").mkdir(parents=True)
  (tmp_path / "hops" / "seed1" / "report.json").write_text(json.dumps(search_report(0.7)))
  summary = sweep.publish(tmp_path, *sweep.read_done(tmp_path))
  assert made == []
  assert {group: found["runs"] for group, found in summary.items()} == {"kv": 1, "hops": 1}
  assert summary["kv"]["values"]["conditions.memory.worst"]["of_runs"] == [["seed0", 0.95]]
  assert json.loads((tmp_path / "sweep.json").read_text()) == summary
  with pytest.raises(ValueError, match="has no report of a run"):
    sweep.read_done(tmp_path / "hops")
