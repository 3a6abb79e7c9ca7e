"""The REFRAG experiment: teach the format, let the reward find the strategy, report it beside its reference lines."""

import dataclasses
import json
import time
from collections.abc import Mapping
from typing import Any

import jax
from absl import logging
from etils import epath
from jax.sharding import Mesh

from selfrag_jax.evals import figures
from selfrag_jax.generate.retrieve import RetrieverKind
from selfrag_jax.generate.rollout import RolloutConfig
from selfrag_jax.mesh import check_batch, make_mesh
from selfrag_jax.metrics.statistics import wilson_interval
from selfrag_jax.model.config import ModelConfig, count_params
from selfrag_jax.tasks.search import SearchTask
from selfrag_jax.tasks.two_hop_search import TwoHopSearch
from selfrag_jax.text.chat import visualize_tokenization
from selfrag_jax.train.checkpoint import load
from selfrag_jax.train.episodes import MemoryConfig, Player, Scores, evaluate
from selfrag_jax.train.loop import checkpoints, train
from selfrag_jax.train.phases.refrag import Refrag
from selfrag_jax.train.phases.sft import SFT
from selfrag_jax.train.settings import EvalConfig, LoopConfig, RLConfig, SFTConfig, settings
from selfrag_jax.train.workdir import write_json
from selfrag_jax.typing import Params


@dataclasses.dataclass
class Experiment:
  """A checked config, and the parts that all phases share."""

  config: dict[str, Any]
  mesh: Mesh
  task: SearchTask
  model: ModelConfig
  player: Player
  rollout: RolloutConfig
  sft: SFTConfig
  sft_gold: SFTConfig
  rl: RLConfig
  evaluation: EvalConfig
  loop: LoopConfig

  @property
  def seed(self) -> int:
    return self.config["seed"]

  @property
  def metadata(self) -> dict[str, Any]:
    """What a checkpoint says about itself."""
    return {
      "config": self.config,
      "model": self.model.to_dict(),
      "tokenizer": {"name": self.task.tokenizer.name, "fingerprint": self.task.tokenizer.fingerprint},
    }

  def evaluate(self, params: Params, split: str, n: int, kind: RetrieverKind = "memory", **overrides: Any) -> Scores:
    """Score a policy greedily; `overrides` change the rollout's bounds."""
    rollout = dataclasses.replace(self.rollout, **overrides)
    return evaluate(self.player, params, split, n, self.evaluation.batch_size, rollout, kind)

  def sft_phase(self, name: str, config: SFTConfig) -> SFT:
    return SFT(
      name,
      self.task,
      self.model,
      config,
      max_hops=self.rollout.max_hops,
      mesh=self.mesh,
      seed=self.seed,
      params=None,
      evaluate_policy=lambda params: self.evaluate(params, "valid", self.evaluation.periodic).means(),
    )

  def rl_phase(self, params: Params) -> Refrag:
    return Refrag(
      "rl",
      self.player,
      self.model,
      self.rl,
      self.rollout,
      self.evaluation,
      mesh=self.mesh,
      seed=self.seed,
      params=params,
    )


def build(config: Mapping[str, Any]) -> Experiment:
  """Check a config (nested dicts) and build what it describes. Raises ValueError with the fix where it does not fit."""
  known = (
    "experiment",
    "seed",
    "mesh",
    "task",
    "model",
    "memory",
    "rollout",
    "sft",
    "sft_gold",
    "rl",
    "evaluation",
    "loop",
  )
  config = {name: config[name] for name in known}
  mesh = make_mesh(config["mesh"])
  task = make_task(config["task"])
  model = settings(ModelConfig, {"vocab_size": task.tokenizer.vocab_size, **config["model"]}, "model")
  evaluation = settings(EvalConfig, config["evaluation"], "evaluation")
  check_batch(mesh, evaluation.batch_size, "evaluation.batch_size")
  experiment = Experiment(
    config=config,
    mesh=mesh,
    task=task,
    model=model,
    player=Player(task, model, settings(MemoryConfig, config["memory"], "memory"), mesh),
    rollout=settings(RolloutConfig, config["rollout"], "rollout"),
    sft=settings(SFTConfig, config["sft"], "sft"),
    sft_gold=settings(SFTConfig, config["sft_gold"], "sft_gold"),
    rl=settings(RLConfig, config["rl"], "rl"),
    evaluation=evaluation,
    loop=settings(LoopConfig, config["loop"], "loop"),
  )
  with jax.set_mesh(mesh):  # the phases check their batches: the last one now, not after hours of the first
    sft = experiment.sft_phase("sft", experiment.sft)
    experiment.sft_phase("sft_gold", experiment.sft_gold)
    experiment.rl_phase(sft.abstract_state().params)
  return experiment


def make_task(section: Mapping[str, Any]) -> SearchTask:
  """Build the task that `config.task.name` names from the other keys of its section."""
  options = {key: value for key, value in section.items() if key != "name"}
  if section["name"] == "two_hop":
    return TwoHopSearch(**options)
  raise ValueError(f"config.task.name is {section['name']!r}; one of two_hop")


def run(experiment: Experiment, workdir: epath.PathLike) -> dict[str, Any]:
  """Run all phases, each from its newest checkpoint, then evaluate and write `report.json` and `report.png`.

  `config.json` is written beside them: until then the checkpoints hold the config.
  """
  started = time.monotonic()
  workdir = epath.Path(workdir)
  logging.info(
    "%s parameters, block pattern %s",
    f"{count_params(experiment.model)['total']:,}",
    experiment.model.to_dict()["block_pattern"],
  )
  with jax.set_mesh(experiment.mesh):
    sft = train(experiment.sft_phase("sft", experiment.sft), workdir, experiment.loop, experiment.metadata).params
    sft_gold = train(
      experiment.sft_phase("sft_gold", experiment.sft_gold), workdir, experiment.loop, experiment.metadata
    ).params
    refrag = train(experiment.rl_phase(sft), workdir, experiment.loop, experiment.metadata).params
    report = evaluate_all(experiment, sft, sft_gold, refrag)
  report["wall_seconds"] = round(time.monotonic() - started, 1)
  write_json(workdir / "config.json", experiment.config)
  write_json(workdir / "report.json", report)
  figures.em_over_steps(workdir, report)
  print(table(report))
  return report


def evaluate_all(experiment: Experiment, sft: Params, sft_gold: Params, refrag: Params) -> dict[str, Any]:
  """Evaluate every policy and reference line on the same held-out questions."""
  n = experiment.evaluation.final
  scores = {
    "closed_book": experiment.evaluate(refrag, "test", n, max_hops=0),
    "one_search": experiment.evaluate(refrag, "test", n, max_hops=1),
    "sft": experiment.evaluate(sft, "test", n),
    "sft_gold": experiment.evaluate(sft_gold, "test", n),
    "refrag": experiment.evaluate(refrag, "test", n),
    "oracle": experiment.evaluate(refrag, "test", n, kind="oracle"),
  }
  final = scores["refrag"]
  count = len(final.exact_match)
  em = {name: float(score.exact_match.mean()) for name, score in scores.items()}
  interval = lambda score: list(wilson_interval(int(score.exact_match.sum()), len(score.exact_match)))
  return {
    "em": em,
    "em_interval": {name: interval(score) for name, score in scores.items()},
    "f1": {name: float(score.f1.mean()) for name, score in scores.items()},
    "recall": {"hop1": float(final.first_gold.mean()), "gold": float(final.gold_recall.mean())},
    "searches_per_question": float(final.searches.mean()),
    "format_valid": float(final.valid.mean()),
    "chance": experiment.task.chance,
    "n": count,
    "parameters": count_params(experiment.model)["total"],
    "block_pattern": experiment.model.to_dict()["block_pattern"],
    "seed": experiment.seed,
  }


DESCRIPTIONS = {
  "closed_book": "the same policy, no search allowed",
  "one_search": "the same policy, one search allowed",
  "sft": "before reinforcement: it knows the format",
  "sft_gold": "trained on gold demonstrations instead",
  "refrag": "after reinforcement",
  "oracle": "the same policy, given the gold documents",
}


def table(report: Mapping[str, Any]) -> str:
  """Format the report for a terminal."""
  lines = [f"{'':12} {'EM':>6}  95 % interval"]
  for name, text in DESCRIPTIONS.items():
    low, high = report["em_interval"][name]
    lines.append(f"{name:12} {report['em'][name]:6.3f}  [{low:.3f}, {high:.3f}]  {text}")
  lines.append(f"{'chance':12} {report['chance']:6.3f}")
  lines.append(
    f"first document found {report['recall']['hop1']:.3f}, gold documents {report['recall']['gold']:.3f}, "
    f"searches a question {report['searches_per_question']:.2f}, valid format {report['format_valid']:.3f}, "
    f"n = {report['n']}, {report['wall_seconds']:.0f} s"
  )
  return "\n".join(lines)


def load_policy(experiment: Experiment, workdir: epath.PathLike, phase: str) -> Params:
  """Read the newest intact parameters of a phase. Raises ValueError for another tokenizer or model shape."""
  with jax.set_mesh(experiment.mesh):
    abstract = experiment.sft_phase("sft", experiment.sft).abstract_state()
  restored = load(checkpoints(workdir, phase), {"params": abstract.params})
  if restored is None:
    raise FileNotFoundError(f"{checkpoints(workdir, phase)} has no intact checkpoint; train it first")
  saved, ours = restored.metadata["tokenizer"], experiment.metadata["tokenizer"]
  if saved != ours:
    raise ValueError(f"the checkpoint's tokenizer is {json.dumps(saved)}, the task's is {json.dumps(ours)}")
  return restored.state["params"]


def dry_run(experiment: Experiment) -> None:
  """Print mesh, parameters, the memory that each compiled program needs, and the first batch, decoded."""
  counts, rows = count_params(experiment.model), []
  print(
    f"mesh        {dict(experiment.mesh.shape)} on {experiment.mesh.devices.size} {jax.devices()[0].platform} devices"
  )
  print(f"parameters  {', '.join(f'{name} {count:,}' for name, count in counts.items() if count)}")
  print(f"pattern     {experiment.model.to_dict()['block_pattern']}")
  with jax.set_mesh(experiment.mesh):
    sft = experiment.sft_phase("sft", experiment.sft)
    programs = {f"sft {name}": lowered for name, lowered in sft.lower().items()}
    programs |= {
      f"rl {name}": lowered for name, lowered in experiment.rl_phase(sft.abstract_state().params).lower().items()
    }
    for name, lowered in programs.items():
      memory: Any = lowered.compile().memory_analysis()
      rows.append((name, memory.argument_size_in_bytes, memory.temp_size_in_bytes, memory.output_size_in_bytes))
  print(f"{'a device':12}{'arguments':>12}{'temporary':>12}{'results':>12}  MiB")
  for name, *sizes in rows:
    print(f"{name:12}" + "".join(f"{size / 2**20:12.1f}" for size in sizes))
  batch = sft.batch(0)
  length = int(batch["segment_ids"][0].sum())
  print("first demonstration of phase sft («…» is trained on):")
  print(
    visualize_tokenization(
      experiment.task.tokenizer, batch["tokens"][0, :length], batch["mask"][0, :length], color=False
    )
  )
