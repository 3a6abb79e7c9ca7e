"""The position-recall experiment end to end, tiny: its training, its report, and the configs that it refuses."""

import csv
import json

import flax.linen as nn
import jax
import jsonschema
import pytest

from configs import memory, position_recall, pretrain
from selfrag_jax.experiments import position_recall as recall_experiment
from selfrag_jax.experiments import self_rag, sweep
from selfrag_jax.experiments.position_recall import CONDITIONS, build, evaluate
from selfrag_jax.model.lm import init_params
from selfrag_jax.reports.page import write_page
from selfrag_jax.reports.recall_by_position import checks, table
from selfrag_jax.reports.schema import read_schema
from selfrag_jax.reports.thresholds import numbers
from selfrag_jax.train.load import load_model

TINY = {"d_model": 16, "n_layers": 1, "n_heads": 2, "block_pattern": "T", "mlp_dim": 16}
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")


def tiny(get_config, variant="kv", **changes):
  config = get_config(variant)
  config.mesh.data = 8
  config.model.update(TINY)
  config.self_rag.update(top_k=4)
  for name in ("pairs", "pretrain"):
    if name in config:
      config[name].update(steps=2, batch_size=8, valid_rows=8, needed_loss=0.0)
  for name in ("memory", "position_recall"):
    if name in config:
      config[name].update(steps=2, batch_size=8, needed_loss=0.0)
  if variant == "kv":
    config.data.update(n_facts=16, n_questions=2, text=({"n_facts": 4},))
  if "full_context" in config:
    config.full_context.update(steps=2, batch_size=8, valid_rows=8, text=({"n_facts": 4}, {"n_facts": 8, "last": 4}))
    config.full_context.models = {"same": TINY, "other": {**TINY, "mlp_dim": 24}}
    config.evaluation.update(n_facts=(16, 32), questions=(4, 3), full_questions=(4, 2), depths=4)
  for section, values in changes.items():
    config[section].update(values) if isinstance(values, dict) else config.update({section: values})
  return config.to_dict()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("run")
  return evaluate(build(tiny(position_recall.get_config)), workdir), workdir


def test_every_condition_is_reported_with_its_budget(report):
  said, workdir = report
  first = {*CONDITIONS, "memory_before", "full_same", "full_other"}
  second = {f"{name}_32" for name in (*CONDITIONS, "full_same", "full_other")}
  assert said["conditions"].keys() == first | second
  for name, curve in said["conditions"].items():
    facts = 32 if name.endswith("_32") else 16
    assert curve["budget"] == (facts if name.startswith("full_") else 4)
    assert curve["n"] == (4 if facts == 16 else 2 if name.startswith("full_") else 3)
    assert len(curve["accuracy_by_depth"]) == len(curve["recall_by_depth"]) == 4
  assert said["middle"]["32"]["n"] == 2 * 2  # questions and depths
  assert said["tokens"].keys() == {
    "pretrain", "memory", "position_recall", "pretrain_other", "full_other", "full_same"
  }  # fmt: skip
  assert said["recall_at_1"].keys() == {"pretrain", "memory", "position_recall"}
  assert json.loads((workdir / "position_recall.json").read_text()) == json.loads(json.dumps(said))
  with (workdir / "position_recall.csv").open() as file:
    rows = list(csv.DictReader(file))
  assert len(rows) == 4 * len(said["conditions"])
  assert {row["position"] for row in rows if row["condition"] == "memory_32"} == {"0", "10", "21", "31"}
  assert (workdir / "position_recall.png").stat().st_size > 10_000


def test_the_names_of_all_numbers_are_known_before(report):
  said, _ = report
  jsonschema.validate(json.loads(json.dumps(said)), read_schema("position_recall"))
  assert recall_experiment.value_names(build(tiny(position_recall.get_config))) == numbers(said).keys()
  kind = sweep.KINDS["position_recall"]
  groups = {"kv": {"one": sweep.Run(kind, build(tiny(position_recall.get_config)), {})}}
  assert sweep.value_names(groups) == numbers({"kv": sweep.summarize({"one": said}, kind)}).keys()


def test_the_page_shows_what_was_retrieved(report):
  said, workdir = report
  page = (workdir / "position_recall.html").read_text()
  assert page.count("<caption>") == len(said["examples"]) == 4
  assert page.count("<td class=holds>") + page.count("<td class=fails>") == len(said["checks"])
  assert "data:image/png;base64," in page
  for example in said["examples"]:
    scores = [chunk["score"] for chunk in example["chunks"]]
    assert len(scores) == 4
    assert scores == sorted(scores, reverse=True)
    name = example["question"].removesuffix(":")
    for chunk in example["chunks"]:
      assert chunk["needed"] == (chunk["text"] == f"{name}: {example['right']}")
  write_page(workdir, {**said, "variant": "<kv>"})
  assert "&lt;kv&gt;" in (workdir / "position_recall.html").read_text()


@pytest.mark.parametrize("variant", ["two_fact", "conflict"])
def test_losses_are_compared_with_all_needed_chunks(variant, monkeypatch):
  monkeypatch.setattr(recall_experiment, "HELD_OUT", 16)
  experiment = build(tiny(position_recall.get_config, variant))
  params = nn.unbox(init_params(experiment.base.model, jax.random.key(0)))
  found = recall_experiment.chunk_losses(experiment, params)
  assert found["n"] == 16
  assert found["gold"] != found["random"] != found["none"]


def test_checks_follow_the_report(report):
  said, _ = report
  good = json.loads(json.dumps(said))
  flat = {"worst": 1.0, "u": 0.0, "range_upper": 0.0, "accuracy": 1.0}
  for name in ("memory", "memory_32", "changed"):
    good["conditions"][name].update(flat)
  for name in ("deleted", "random"):
    good["conditions"][name].update(accuracy=0.0)
  good["conditions"]["head_tail"].update(u=1.0, accuracy_by_depth=[1, 0, 0, 1])
  good["middle"]["32"].update(interval=[0.5, 0.6], mcnemar_p=1e-9)
  good["phase_3_variance"].update(before=0.2, after=0.1, interval=[-0.2, -0.1])
  good["phase_2_loss"].update(gold_minus_random=[-2, -1], gold_minus_none=[-2, -1])
  good["recall_at_1"]["position_recall"] = 1.0
  assert all(check["holds"] for check in checks(good).values()), checks(good)
  still = {**good, "phase_3_variance": {"before": 1e-4, "after": 2e-4, "interval": [-1e-5, 3e-4]}}  # nothing to change
  assert all(check["holds"] for check in checks(still).values())
  assert "FAILS" not in table({**good, "checks": checks(good)})
  assert checks({**good, "middle": {"32": {**good["middle"]["32"], "against": "full_x"}}}).keys() == checks(good).keys()
  breaks = {
    "memory": {"worst": 0.8, "u": -0.06, "range_upper": 0.11}, "memory_32": {"accuracy": 0.8},
    "changed": {"accuracy": 0.9}, "deleted": {"accuracy": 0.1}, "random": {"accuracy": 0.1},
    "head_tail": {"u": 0.5, "accuracy_by_depth": [1] * 4},
  }  # fmt: skip
  for name, values in breaks.items():
    good["conditions"][name].update(values)
  good["middle"]["32"].update(interval=[-0.1, 0.6], mcnemar_p=0.1)
  good["phase_3_variance"].update(before=0.2, after=0.2, interval=[-0.2, 0.1])
  good["phase_2_loss"].update(gold_minus_random=[-2, 1], gold_minus_none=[-2, 1])
  good["recall_at_1"]["position_recall"] = 0.9
  assert not any(check["holds"] for check in checks(good).values())


def test_a_phase_that_has_not_learned_ends_the_run_and_goes_on_with_more_steps(tmp_path):
  with pytest.raises(
    self_rag.NotLearnedError, match=r"phase pretrain ended after 2 steps .* more config.pretrain.steps"
  ):
    self_rag.run(self_rag.build(tiny(memory.get_config, pretrain={"needed_loss": 0.1})), tmp_path)
  assert self_rag.last_phase(tmp_path) == "pretrain"
  self_rag.run(self_rag.build(tiny(memory.get_config, pretrain={"needed_loss": 100.0, "steps": 3})), tmp_path)
  assert self_rag.last_phase(tmp_path) == "memory"


def test_sentences_come_after_pairs_for_every_model(tmp_path):
  experiment = build(tiny(position_recall.get_config, "sentence"))
  pairs, base = experiment.pretrain["pairs"], experiment.base
  assert list(base.phases) == ["pairs", "pretrain", "memory", "position_recall"]
  assert base.phase("pairs", None).batch(0)["tokens"].tolist() == base.rows(pairs)("train", range(8))["tokens"].tolist()
  decode = base.data.tokenizer.decode
  assert "code" not in decode(base.phase("pairs", None).batch(0)["tokens"].ravel())
  assert "code" in decode(base.phase("pretrain", None).batch(0)["tokens"].ravel())
  with jax.set_mesh(base.mesh):
    recall_experiment.train_baseline(experiment, "other", tmp_path, None)
  assert list(recall_experiment.tokens_of(tmp_path)) == ["pairs_other", "pretrain_other", "full_other"]
  origin = load_model(tmp_path, "pretrain_other", tokenizer=base.data.tokenizer).metadata["origin"]
  assert origin == {"phase": "pairs_other", "steps": 2}
  names = recall_experiment.outline(experiment)["tokens"].keys()
  assert {"pairs", "pairs_other", "pretrain_other"} <= names


def test_the_phases_are_scored_from_their_checkpoints(report, tmp_path):
  _, workdir = report
  before = (workdir / "metrics.jsonl").read_text()
  experiment = self_rag.build(tiny(position_recall.get_config))
  scores = self_rag.evaluate(experiment, workdir)
  assert (workdir / "metrics.jsonl").read_text() == before  # nothing was trained
  saved = json.loads((workdir / "self_rag.json").read_text())
  assert saved == json.loads(json.dumps(scores))
  jsonschema.validate(saved, read_schema("self_rag"))
  assert list(scores["scores"]) == ["pretrain", "memory", "position_recall"]
  assert self_rag.value_names(experiment) == numbers(saved).keys()
  loaded = load_model(workdir, "memory", tokenizer=experiment.data.tokenizer, mesh=experiment.mesh)
  with jax.set_mesh(experiment.mesh):
    assert scores["scores"]["memory"] == experiment.validate(loaded.params)
  with (workdir / "self_rag.csv").open() as file:
    assert [row["phase"] for row in csv.DictReader(file)] == list(scores["scores"])
  with pytest.raises(ValueError, match=r"checkpoints/pretrain is at step 0, config\.pretrain\.steps is 2: train"):
    self_rag.evaluate(experiment, tmp_path)


def test_training_goes_on_where_another_run_ended(report, tmp_path):
  _, workdir = report
  with pytest.raises(ValueError, match="has gone through phase position_recall: nothing is left to train"):
    build(tiny(position_recall.get_config, init=str(workdir)))
  config = tiny(pretrain.get_config)
  self_rag.run(self_rag.build(config), tmp_path / "one")
  two = self_rag.build(tiny(memory.get_config, init=str(tmp_path / "one")))
  assert list(two.phases) == ["memory"]
  scores = self_rag.run(two, tmp_path / "two")
  assert scores.keys() == {"accuracy", "recall_at_1", "loss"}
  with pytest.raises(ValueError, match="nowhere has no checkpoints of pairs, pretrain, memory"):
    self_rag.build(tiny(memory.get_config, init=str(tmp_path / "nowhere")))
  with pytest.raises(ValueError, match=r"holds the model .* not "):
    self_rag.build(tiny(memory.get_config, init=str(tmp_path / "one"), model={"d_model": 32}))


def test_phases_read_text_files(tmp_path, capsys):
  (tmp_path / "a.txt").write_text("All work and no play makes Jack a dull boy. " * 400)
  data = {"path": str(tmp_path / "a.txt"), "row_tokens": 32, "n_chunks": 4, "chunk_tokens": 16}
  experiment = self_rag.build(tiny(memory.get_config, "text", data=data))
  self_rag.dry_run(experiment)
  said = capsys.readouterr().out
  assert "first row of phase pretrain" in said
  assert "4 chunks such as" in said
  scores = self_rag.run(experiment, tmp_path / "run")
  assert scores.keys() == {"loss", "loss_given_gold", "loss_without"}
  report = self_rag.evaluate(experiment, tmp_path / "run")
  assert report["scores"]["memory"] == scores
  jsonschema.validate(report, read_schema("self_rag"))
  assert self_rag.value_names(experiment) == numbers(report).keys()
  with pytest.raises(ValueError, match="position_recall asks about facts"):
    build(tiny(position_recall.get_config, "text", data=data))
  lists = {"pairs": pretrain.pretraining(2, 0.0)}
  with pytest.raises(ValueError, match="phase pairs trains on lists of facts"):
    self_rag.build({**tiny(pretrain.get_config, "text", data=data), **lists})


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"data": {"name": "web"}}, r"config\.data\.name is 'web'; one of facts, text"),
    ({"self_rag": {"chunk_size": 2}}, "chunks have up to 4 tokens, self_rag.chunk_size is 2"),
    ({"evaluation": {"questions": (1,)}}, "must be as many numbers as n_facts"),
    ({"evaluation": {"full_questions": (9, 2)}}, r"full_questions \(9, 2\) must not be more than questions \(4, 3\)"),
    ({"full_context": {"models": {"odd": {"n_heads": 3}}}}, "n_heads 3 is not divisible by"),
  ],
)
def test_what_does_not_fit_is_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    build(tiny(position_recall.get_config, **changes))
  with pytest.raises(ValueError, match="no variant 'nope'; one of kv, "):
    position_recall.get_config("nope")
