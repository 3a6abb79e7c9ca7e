"""REFRAG on a tiny folder of questions and passages: a pretrained policy, supervision, reinforcement, a report.

Every token of the policy is known (see `few_towns.py`), and so is every figure of the report.
"""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from selfrag_jax.experiments import base, rollout_examples
from selfrag_jax.experiments.refrag import bm25, build, dry_run, evaluate, load_policy, run, value_names
from selfrag_jax.memory.topk_numpy import search_numpy
from selfrag_jax.reports.schema import read_schema
from selfrag_jax.reports.thresholds import numbers
from selfrag_jax.storage.arrays import read_npz
from selfrag_jax.text.chat import document_body
from tests.experiments.few_towns import PASSAGES, SLOTS, small_config

# the lines of the report, with the policy that each is about and how often it may search
LINES = {
  "base": ("base", 2),
  "closed_book": ("rl", 0),
  "one_search": ("rl", 1),
  "sft": ("sft", 2),
  "refrag": ("rl", 2),
  "bm25": ("rl", 2),
  "oracle": ("rl", 2),
}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
  return small_config(tmp_path_factory.mktemp)


@pytest.fixture(scope="module")
def experiment(config):
  return build(config)


@pytest.fixture(scope="module")
def finished(experiment, tmp_path_factory):
  """The folder of a run, and for each line of its report the parameters and their scores."""
  folder, lines, evaluate = tmp_path_factory.mktemp("run"), [], experiment.evaluate

  def noted(params, split, *args, **overrides):
    scores = evaluate(params, split, *args, **overrides)
    if split == "test":
      lines.append((params, scores))
    return scores

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(experiment, "evaluate", noted)
    run(experiment, folder)
  return folder, dict(zip(LINES, lines, strict=True))


@pytest.fixture(scope="module")
def workdir(finished):
  return finished[0]


def report_of(workdir):
  return json.loads((workdir / "report.json").read_text())


def test_every_line_of_the_report_is_about_its_policy_within_its_bounds(experiment, finished):
  workdir, lines = finished
  embed = lambda params: np.asarray(params["params"]["embed"])
  policies = {phase: embed(load_policy(experiment, workdir, phase)) for phase in ("sft", "rl")}
  policies["base"] = embed(experiment.base_params)
  assert len({policy.tobytes() for policy in policies.values()}) == 3
  for name, (params, scores) in lines.items():
    policy, searches = LINES[name]
    np.testing.assert_array_equal(embed(params), policies[policy], err_msg=name)
    assert scores.searches.tolist() == [searches] * 3, name


def test_the_report_says_what_the_policy_does(experiment, workdir):
  report, task, runner = report_of(workdir), experiment.task, experiment.runner
  asked = task.batch("test", range(3))
  right = np.mean([answers == ("Mulder",) for answers in asked.answers])
  assert 0 < right < 1
  for name in ("em", "f1"):
    assert report[name] == pytest.approx(dict.fromkeys(LINES, right))
  assert report["em_interval"].keys() == LINES.keys()
  assert all(0 <= low <= right <= high <= 1 for low, high in report["em_interval"].values())
  assert report["valid"] == dict.fromkeys(LINES, 1)
  assert (report["n"], report["searches_per_question"], report["format_valid"]) == (3, 2, 1)
  assert (report["task"], report["dropped_questions"], report["cut_passages"]) == ("passages", 1, 0)

  query = np.array([task.tokenizer.encode("Velden")])
  memory, lengths = runner.memory(task.corpus), np.array([query.shape[1]])
  slots = search_numpy(memory, runner.encoder.apply(runner.encoder.params, query, lengths), 2).slots[0]
  assert slots[0] == SLOTS["Velden"]
  found = np.isin(asked.gold, slots)
  assert report["recall"] == pytest.approx({"hop1": found[:, 0].mean(), "gold": found.mean()})
  # to BM25 " Velden" is the same word, so that it finds who was born there too
  by_words = np.isin(asked.gold, [SLOTS["Velden"], SLOTS["Ada"]])
  all_gold = dict.fromkeys(LINES, found.all(axis=1).mean())
  all_gold |= {"closed_book": 0, "bm25": by_words.all(axis=1).mean(), "oracle": 1}
  assert report["all_gold"] == pytest.approx(all_gold)
  assert all_gold["refrag"] < all_gold["bm25"] < all_gold["oracle"]

  # with the question alone, BM25 finds both passages where it names both
  named = [text.startswith("Who") for text in task.texts("test", range(task.size("test")))]
  assert 0 < np.mean(named) < 1
  assert report["bm25_question_all_gold"] == np.mean(named)
  everyone = task.batch("test", range(task.size("test")))
  slots = runner.search(everyone, experiment.document_budget)
  of_question = [set(gold[gold >= 0]) <= set(found) for gold, found in zip(everyone.gold, slots, strict=True)]
  assert report["memory_question_all_gold"] == pytest.approx(np.mean(of_question))
  assert read_npz(workdir / "report.npz")["memory_question.all_gold"].tolist() == of_question


def test_one_search_for_the_questions_finds_what_numpy_finds(experiment):
  runner, batch = experiment.runner, experiment.task.batch("test", range(3))
  memory = runner.memory(batch.corpus)  # fits the encoder
  asked = runner.encoder.apply(runner.encoder.params, batch.questions, batch.question_lengths)
  expected = search_numpy(memory, asked, 4).slots
  np.testing.assert_array_equal(runner.search(batch, 4), expected)
  assert len({tuple(row) for row in expected.tolist()}) > 1  # it depends on the question


def test_beside_the_report_lie_its_figure_and_the_config(config, workdir):
  assert (workdir / "report.png").read_bytes().startswith(b"\x89PNG\r\n")
  page = (workdir / "report.html").read_text()
  assert page.count("<section") == page.count("right: ") > 0
  assert "before reinforcement</b>" in page
  assert re.search(r"after, sampled</b> <span class=meta>advantage [+-]\d\.\d\d, reward \d\.\d\d", page)
  saved = json.loads((workdir / "config.json").read_text())
  short = ("workdir", "profile_steps")  # the second stands in the section loop
  assert saved == json.loads(json.dumps({name: value for name, value in config.items() if name not in short}))
  report = report_of(workdir)
  with np.load(workdir / "report.npz", allow_pickle=False) as scores:  # of each question
    for condition in LINES:
      means = {field: scores[f"{condition}.{field}"].mean() for field in ("exact_match", "f1", "all_gold", "valid")}
      assert list(means.values()) == pytest.approx(
        [report[field][condition] for field in ("em", "f1", "all_gold", "valid")]
      )


def questions_of_page(experiment, policies, path):
  """Write the page of rollouts; return for each question whether it is shown as one that has changed."""
  runner, n = experiment.runner, experiment.evaluation.batch_size
  rollout_examples.write_examples(path, runner, policies, experiment.rollout, experiment.rl, n)
  page = path.read_text()
  found = [kind == "changed" for kind in re.findall(r"<section class=(\w+)>", page)]
  assert f"{len(found)} questions, {sum(found)} of them with another greedy rollout" in page
  return found


def test_a_page_shows_what_another_answer_has_changed(experiment, tmp_path):
  before, [mulder] = experiment.base_params, experiment.task.tokenizer.encode("Mulder")
  head = np.array(before["params"]["unembed"])
  head[mulder] = -1
  after = {"params": before["params"] | {"unembed": head}}  # answers Rhine
  unchanged = questions_of_page(experiment, {"before": before, "after": before}, tmp_path / "same.html")
  assert unchanged == [False]
  assert questions_of_page(experiment, {"before": before, "after": after}, tmp_path / "other.html") == [True]
  there_and_back = {"before": before, "between": after, "after": before}
  assert questions_of_page(experiment, there_and_back, tmp_path / "back.html") == unchanged


def test_a_question_has_changed_with_a_query_a_document_or_the_answer(experiment, tmp_path, monkeypatch):
  search = lambda query, *texts: {
    "query": query,
    "documents": [{"text": text, "score": 0.5, "gold": False} for text in texts],
  }
  row = {"policy": "", "hops": [search("Velden", "Ada")], "answer": "Mulder", "reward": 0.0, "advantage": None}
  row |= {"exact": False, "valid": True}
  others = {
    "query": {"hops": [search("Goor", "Ada")]},
    "document": {"hops": [search("Velden", "Emma")]},
    "one more document": {"hops": [search("Velden", "Ada", "Emma")]},
    "one more search": {"hops": [search("Velden", "Ada"), search("Velden", "Ada")]},
    "answer": {"answer": "Rhine"},
    "no answer": {"answer": None},
    "nothing": {},
    "reward": {"reward": 1.0, "exact": True, "valid": False},
  }
  size, of_split = experiment.task.size, rollout_examples._first  # valid has one question
  monkeypatch.setattr(experiment.task, "size", lambda split: size("test"))
  monkeypatch.setattr(rollout_examples, "_first", lambda runner, split, n: of_split(runner, "test", n))
  monkeypatch.setattr(experiment.runner, "run", lambda *_, **__: None)
  for name, changes in others.items():
    rows = {"before": [row] * 99, "after": [row | changes, *[row] * 98]}
    rows["after, sampled"] = [row | {"answer": "Meuse"}] * 64
    monkeypatch.setattr(rollout_examples, "_described", lambda *args, rows=rows: rows[args[-1]])
    found = questions_of_page(experiment, {"before": None, "after": None}, tmp_path / "report.html")
    assert found == [name not in ("nothing", "reward"), *[False] * (size("test") - 1)], name


def test_running_again_trains_no_more_and_reports_the_same(config, workdir):
  before, report = (workdir / "metrics.jsonl").read_text(), report_of(workdir)
  steps = [(row["phase"], row["step"]) for row in map(json.loads, before.splitlines()) if "loss" in row]
  assert steps == [("sft", 1), ("sft", 2), ("rl", 1)]
  again = run(build(config), workdir)
  assert (workdir / "metrics.jsonl").read_text() == before
  assert again | {"wall_seconds": 0} == report | {"wall_seconds": 0}


def test_an_evaluation_reads_the_checkpoints_and_reports_the_same(experiment, workdir, monkeypatch):
  report = report_of(workdir)
  jsonschema.validate(report, read_schema("refrag"))
  assert value_names(experiment) == numbers(report).keys()
  with (workdir / "report.csv").open() as file:
    rows = list(csv.DictReader(file))
  assert [row["condition"] for row in rows] == list(LINES)
  assert [float(row["em"]) for row in rows] == pytest.approx([report["em"][name] for name in LINES], abs=1e-4)
  monkeypatch.setattr(base, "train", None)  # nothing is trained
  files = {path: path.stat().st_mtime_ns for path in (workdir / "checkpoints").rglob("*")}
  again = evaluate(experiment, workdir)
  assert again | {"wall_seconds": 0} == report | {"wall_seconds": 0}
  assert files == {path: path.stat().st_mtime_ns for path in (workdir / "checkpoints").rglob("*")}


def test_an_evaluation_trains_nothing_and_says_what_is_missing(config, experiment, workdir, tmp_path):
  with pytest.raises(ValueError, match=r"checkpoints/sft is at step 0, config\.sft\.steps is 2: train the phase"):
    evaluate(experiment, tmp_path)
  longer = build({**config, "sft": {**config["sft"], "steps": 3}})
  with pytest.raises(ValueError, match=r"checkpoints/sft is at step 2, config\.sft\.steps is 3: train the phase"):
    evaluate(longer, workdir)
  other = build({**config, "model": {**config["model"], "norm_eps": 1e-4}})
  with pytest.raises(ValueError, match=r"written with another model .*norm_eps.*: use another workdir"):
    evaluate(other, workdir)


def test_a_run_is_read_whatever_way_its_model_is_computed(config, workdir):
  evaluate(build({**config, "model": {**config["model"], "remat": "full", "kernels": "xla"}}), workdir)


def test_a_dry_run_shows_what_would_run(experiment, capsys):
  dry_run(experiment)
  said = capsys.readouterr().out
  for line in ("mesh ", "parameters ", "sft update ", "rl rollout ", "rl update "):
    assert f"\n{line}" in f"\n{said}"
  shown = said.split("is trained on):\n")[1]
  demonstration = experiment.task.demonstration("sft", experiment.sft_phase("sft", experiment.sft).row(0)[0], "gold", 2)
  query, found, *_, answer = demonstration["messages"][-1]["content"]
  spoken = shown.replace("|", "").replace("«", "").replace("»", "")
  assert f"<search_start>{query['text']}<search_end>" in spoken
  assert f"{found['documents'][0]['content']}[/DOC_1]" in spoken
  assert spoken.strip().endswith(f"<answer_start>{answer['text']}<answer_end><im_end>\\n")
  assert "«<|search_start|>»" in shown


def test_bm25_finds_the_passage_that_a_query_names(experiment):
  tokenizer = experiment.task.tokenizer
  found = bm25(experiment)([tokenizer.encode(text) for text in ("the mayor Visser", "GOOR", "unheard of", "")], 0)
  [mayor, goor, nothing, silence] = found
  slot, body = mayor[0]
  assert slot == SLOTS["Elst"]
  assert body == document_body(tokenizer, {"title": "Elst", "content": PASSAGES["Elst"]})
  assert [slot for slot, _ in goor] == [SLOTS["Goor"], SLOTS["Emma"]]  # nothing of the others, although there is room
  assert nothing == silence == []


def test_of_passages_with_one_score_bm25_takes_the_first(experiment):
  [found] = bm25(experiment)([experiment.task.tokenizer.encode("governed")], 0)
  assert [slot for slot, _ in found] == [SLOTS[town] for town in ("Velden", "Arcen", "Doorn", "Elst")]  # of six


def test_bm25_answers_a_batch_in_which_nobody_searches(experiment):
  assert bm25(experiment)([[], []], 0) == [[], []]


ARMS = ("outcome", "evidence", "experts", "mimic")


def start_arms(config, workdir, *arguments):
  given = {f"config.{section}.{key}": value for section in ("data", "memory") for key, value in config[section].items()}
  given = {key: value for key, value in given.items() if isinstance(value, int | str) and key != "config.data.name"}
  sizes = {"rollout": ("max_hops", "documents_per_hop", "max_query_tokens", "max_answer_tokens")}
  sizes |= {"sft": ("steps", "max_tokens", "accumulate"), "evaluation": ("periodic", "final", "batch_size")}
  sizes |= {"rl": ("steps", "questions_per_step", "rollouts_per_question", "accumulate")}
  given |= {f"config.{section}.{key}": config[section][key] for section, keys in sizes.items() for key in keys}
  flags = [f"--{key}={value}" for key, value in given.items() if value != ""]
  script = Path(__file__).resolve().parents[2] / "benchmarks" / "refrag_arms.py"
  command = [sys.executable, str(script), f"--workdir={workdir}", f"--config.init={config['init']}", *flags, *arguments]
  return subprocess.run(command, capture_output=True, text=True, timeout=600)


def read_parts(workdir, name):
  parts = [read_npz(workdir / f"fold{fold}" / f"{name}.npz") for fold in (0, 1)]
  return {field: np.concatenate([part[field] for part in parts]) for field in parts[0]}


def reinforcement_of(workdir):
  """Return the metrics of the only step of reinforcement."""
  rows = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
  return next(row for row in rows if row["phase"] == "rl" and "reward" in row)


ARMS_OF = """
import dataclasses, json, sys
from benchmarks.refrag_arms import arms
from selfrag_jax.tasks.rewards import RAGRewardWeights, RewardConfig
from selfrag_jax.train.phases.refrag import RLConfig

reward = RewardConfig(f1_weight=0.5, weights=RAGRewardWeights(relevance=0.7, efficiency=0.2))
found = [RLConfig(), RLConfig(steps=7, kl_weight=0.3, advantage="grpo", reward=reward)]
print(json.dumps([{name: dataclasses.asdict(rl) for name, rl in ({"": rl} | arms(rl)).items()} for rl in found]))
"""


def test_the_arms_differ_in_what_they_are_named_for_alone():
  script = [sys.executable, "-c", ARMS_OF]
  told = subprocess.run(script, capture_output=True, text=True, timeout=600, cwd=Path(__file__).resolve().parents[2])
  assert told.returncode == 0, told.stderr[-2000:]
  for found, kl in zip(json.loads(told.stdout), (0.1, 0.3), strict=True):
    given = found.pop("")
    evidence = given | {"reward": given["reward"] | {"terms": "weighted"}}
    answers = evidence["reward"] | {"weights": given["reward"]["weights"] | {"relevance": 0}}
    assert given["reward"]["weights"]["relevance"] > 0
    assert found == {
      "outcome": evidence | {"reward": answers},
      "evidence": evidence,
      "experts": evidence | {"experts": True, "resample": 4},
      "mimic": evidence | {"kl_on": "wrong", "kl_weight": kl},
    }


def test_arms_of_two_folds_are_run_once_and_stand_in_one_table(config, tmp_path):
  chosen = ("--folds=2", "--dense=token-bag")  # all arms
  first = start_arms(config, tmp_path, *chosen)
  assert first.returncode == 0, first.stderr[-2000:]
  table = first.stdout[first.stdout.index("6 questions of 2 folds") :].splitlines()
  names = [line[:48].rstrip() for line in table[3:-6]]
  assert names[:3] == ["BM25", "token-bag", "both fused"]
  assert "one search of the memory, second query by rule" in names
  policies = ["demonstrations only", *ARMS]
  other = ["", "policies whose queries both fused answer"]
  assert names[-13:] == ["one search of the memory", *policies, *other, *policies]
  assert [line.partition(":")[0] for line in table[-4:]] == [*ARMS]
  # every question is in one fold at most, so that the two are joined
  mean = read_parts(tmp_path, "evidence")["all_gold"].mean()
  assert f"{'evidence':48}{mean:.3f} " in first.stdout
  assert (tmp_path / "fold1" / "experts" / "report.html").exists()

  # the same rollouts earn otherwise without their documents, some go on, some are pulled
  steps = {name: reinforcement_of(tmp_path / "fold0" / name) for name in ARMS}
  assert steps["outcome"]["reward"] != steps["evidence"]["reward"] == steps["experts"]["reward"]
  assert steps["evidence"]["reward"] == steps["mimic"]["reward"]
  assert [name for name in ARMS if "near_misses" in steps[name]] == ["experts"]
  assert [name for name in ARMS if "kl" in steps[name]] == ["mimic"]

  # the difference to the one search of the same retriever is told
  fields = ("all_gold", "exact_match", "f1", "searches", "valid")
  arm, one = (read_parts(tmp_path, name) for name in ("evidence", "peers"))
  assert f"  {(arm['all_gold by both fused'] - one['both fused']).mean():+.3f} [" in table[-9]
  assert set(arm) == {*fields, *(f"{field} by both fused" for field in fields)}

  kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("fold*/*.npz")}
  (tmp_path / "fold1" / "experts.npz").unlink()
  again = start_arms(config, tmp_path, *chosen)
  assert again.stdout[again.stdout.index("6 questions") :].splitlines() == table  # from the checkpoints
  changed = {path for path, time in kept.items() if path.stat().st_mtime_ns != time}
  assert changed == {tmp_path / "fold1" / "experts.npz"}

  (tmp_path / "fold0" / "outcome.npz").unlink()
  some = start_arms(config, tmp_path, *chosen, "--arm=evidence", "--arm=mimic")
  lines = some.stdout[some.stdout.index("6 questions") :].splitlines()
  assert lines == [line for line in table if not line.startswith(("outcome", "experts"))]
  assert not (tmp_path / "fold0" / "outcome.npz").exists()

  # an arm can be put into the table of expectations, with the demonstrations that it started from
  script = Path(__file__).resolve().parents[2] / "benchmarks" / "expectations.py"
  command = [sys.executable, str(script), f"--refrag={tmp_path / 'fold0' / 'evidence'}", "--questions=3", "--repeats=1"]
  told = subprocess.run(command, capture_output=True, text=True, timeout=600)
  assert told.returncode == 0, told.stderr[-2000:]
  [times] = re.findall(r"\| \| T \| - \| 1 \| (\d+\.\d) \|", told.stdout)
  assert float(times) > 1

  other = start_arms(config, tmp_path, *chosen, "--config.rl.optimizer.learning_rate=0.5")
  assert other.returncode == 1
  assert "has other settings than this run: use another --workdir" in other.stderr
