"""The reward model experiment: a language model learns from preference pairs which conversations are good."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh
from scipy.special import expit

from selfrag_jax.aot.table import print_plan
from selfrag_jax.checked import Checked, Count
from selfrag_jax.encoders.batches import embed_by_length
from selfrag_jax.experiments import base
from selfrag_jax.experiments.search_data import DATA, make_task, read_folder
from selfrag_jax.generate.rollout import RolloutConfig
from selfrag_jax.mesh import check_shards, fetch, make_mesh, place
from selfrag_jax.metrics.statistics import wilson_interval
from selfrag_jax.model.config import ModelConfig, count_params
from selfrag_jax.model.pretrained import load_pretrained
from selfrag_jax.model.reward_model import score
from selfrag_jax.ragged import round_up
from selfrag_jax.reports.thresholds import numbers
from selfrag_jax.settings import read_config, settings
from selfrag_jax.tasks.preferences import KINDS, preference_pair, render_pair
from selfrag_jax.tasks.search_task import SearchTask
from selfrag_jax.text.chat import visualize_tokenization
from selfrag_jax.train.loop import LoopConfig
from selfrag_jax.train.phases.base import GradientPhase, Start
from selfrag_jax.train.phases.reward_model import RenderedPair, RewardModelConfig, RewardModelPhase, ranked_right
from selfrag_jax.train.phases.sft import SFT, OptionalSFTConfig
from selfrag_jax.train.state import param_shardings
from selfrag_jax.train.telemetry import seconds_spent
from selfrag_jax.typing import Params


@dataclasses.dataclass(frozen=True)
class PairsConfig(Checked):
  """The bounds of the conversations of a pair, those of the rollouts that the model will score."""

  max_hops: Count = 2
  max_query_tokens: Count = 8  # of a query for passages


@dataclasses.dataclass(frozen=True)
class EvalConfig(Checked):
  """Held-out pairs: `periodic` of the validation while training, `final` of the test for the report."""

  periodic: Count = 256
  final: Count = 1024


OWN = {
  "pairs": PairsConfig,
  "sft": OptionalSFTConfig,
  "reward_model": RewardModelConfig,
  "evaluation": EvalConfig,
  "loop": LoopConfig,
}
SECTIONS = {**base.TRAINED, "data": DATA, "model": Mapping, **OWN}
BUCKET = 32  # conversations are padded to a multiple, for few shapes to compile


class PairScores(NamedTuple):
  """Scores of held-out pairs, float32 [N]; what is wrong in each rejected conversation; lengths in tokens [N, 2]."""

  chosen: np.ndarray
  rejected: np.ndarray
  kinds: np.ndarray
  lengths: np.ndarray

  @property
  def right(self) -> np.ndarray:
    """Whether each pair is ranked rightly; 1/2 for a tie."""
    return np.asarray(ranked_right(self.chosen - self.rejected), np.float64)

  @property
  def loss(self) -> float:
    """The mean of -log sigmoid(chosen - rejected)."""
    return float(np.logaddexp(0, self.rejected - self.chosen).mean())


@dataclasses.dataclass
class Experiment:
  """A config and the objects built from it. `base_params`: the pretrained parameters; None: from scratch."""

  config: dict[str, Any]
  mesh: Mesh
  base_params: Params | None
  task: SearchTask
  model: ModelConfig
  pairs: PairsConfig
  sft: OptionalSFTConfig
  reward_model: RewardModelConfig
  evaluation: EvalConfig
  loop: LoopConfig

  @property
  def metadata(self) -> dict[str, Any]:
    """The metadata of a checkpoint."""
    return base.metadata(self.config, self.model, self.task.tokenizer)

  def sft_phase(self) -> SFT:
    """Make the phase that teaches the language model gold conversations."""
    start = self._start(self.base_params, lambda _: {})
    return SFT("sft", self.task, self.model, self.sft, max_hops=self.pairs.max_hops, **start)

  def phase(self, params: Params | None) -> RewardModelPhase:
    """Make the phase that trains the reward model from a language model's parameters; None: from scratch."""
    render, size = lambda index: self.pair("sft", index)[0], self.task.size("sft")
    start = self._start(params, self.validate)
    return RewardModelPhase("reward_model", render, size, self.model, self.reward_model, **start)

  def phases(self) -> list[GradientPhase]:
    """Make all phases, in the order of training, to check and to show them."""
    return [*([self.sft_phase()] if self.sft.steps else []), self.phase(self.base_params)]

  def pair(self, split: str, index: int) -> tuple[RenderedPair, str]:
    """Return a pair's token ids, and what is wrong in its rejected conversation."""
    pair = preference_pair(self.task, split, index, self.pairs.max_hops, self.config["data"]["seed"])
    return render_pair(self.task, pair), pair.kind

  def score(self, params: Params, split: str, n: int) -> PairScores:
    """Score the first `n` pairs of a split."""
    size = self.task.size(split)
    pairs, kinds = zip(*(self.pair(split, i) for i in range(n if size is None else min(n, size))), strict=True)
    rows = [ids for pair in pairs for ids in pair]
    read = lambda *batch: fetch(_score(self.model, params, *batch))[:, None]
    scores = embed_by_length(rows, read, 1, lambda length: round_up(length, BUCKET)).reshape(-1, 2)
    lengths = np.array(list(map(len, rows))).reshape(-1, 2)
    return PairScores(scores[:, 0], scores[:, 1], np.array(kinds), lengths)

  def validate(self, params: Params) -> dict[str, float]:
    """Score held-out pairs while the model trains."""
    scores = self.score(params, "valid", self.evaluation.periodic)
    return {"accuracy": float(scores.right.mean()), "loss": scores.loss}

  def _start(self, params: Params | None, evaluate: Callable[[Params], Mapping[str, float]]) -> Start:
    return {"mesh": self.mesh, "seed": self.config["seed"], "params": params, "evaluate": evaluate}


_score = jax.jit(score, static_argnums=0)


def build(config: Mapping[str, Any]) -> Experiment:
  """Check a config (nested dicts) and build its experiment. Raises ValueError with the fix for a wrong config."""
  config = read_config(config, SECTIONS)
  mesh = make_mesh(**config["mesh"])
  sections: dict[str, Any] = {name: settings(cls, config[name], name) for name, cls in OWN.items()}
  data: Any = settings(DATA[config["data"]["name"]], config["data"], "data")
  folder = read_folder(data, config["init"])  # an error here comes before weights are downloaded
  pretrained = load_pretrained(config["init"]) if config["init"] else None
  bounds = RolloutConfig(max_query_tokens=sections["pairs"].max_query_tokens)
  task = make_task(data, folder, pretrained, bounds)
  fields = {"vocab_size": task.tokenizer.vocab_size} if pretrained is None else {}
  model = base.make_model({**fields, **config["model"]}, mesh, pretrained.config if pretrained else None)
  params = place(dict(pretrained.params), param_shardings(model, mesh)) if pretrained else None
  experiment = Experiment(config, mesh, params, task, model, **sections)
  with jax.set_mesh(mesh):  # phases check their batches: an error in the last comes now, not after hours of the first
    for phase in experiment.phases():
      phase.batch(0)
      check_shards(phase.abstract_state())
  for split in ("valid", "test"):  # a small part may have no two questions with different answers
    experiment.pair(split, 0)
  return experiment


def planned(experiment: Experiment) -> dict[str, GradientPhase]:
  """Make the phases to compile them; none has what the one before it trains."""
  return {phase.name: phase for phase in experiment.phases()}


def dry_run(experiment: Experiment) -> None:
  """Print mesh, parameters, the memory that each compiled program needs, and the first pair, decoded."""
  with jax.set_mesh(experiment.mesh):
    print_plan(experiment.mesh, experiment.model, planned(experiment))
  rendered, kind = experiment.pair("sft", 0)
  for name, ids in zip(("chosen", f"rejected, kind {kind}"), rendered, strict=True):
    print(f"first pair, {name}:")
    print(visualize_tokenization(experiment.task.tokenizer, ids, [0] * len(ids), color=False))


def run(experiment: Experiment, workdir: epath.PathLike) -> dict[str, Any]:
  """Train the phases, each from its newest checkpoint, then evaluate; write `reward_model.json` and `.csv`."""
  return _report(experiment, workdir, base.by_training(workdir, experiment.loop, experiment.metadata))


def evaluate(experiment: Experiment, workdir: epath.PathLike) -> dict[str, Any]:
  """Report as `run` does, but from the checkpoints of the last steps."""
  return _report(experiment, workdir, base.by_reading(workdir, experiment.metadata))


def _report(experiment: Experiment, workdir: epath.PathLike, take: base.TakePhase) -> dict[str, Any]:
  workdir = epath.Path(workdir)
  started = time.monotonic() - seconds_spent(workdir)
  base.announce(experiment.model, workdir)
  with jax.set_mesh(experiment.mesh):
    params, origin = experiment.base_params, {}
    if experiment.sft.steps:
      params = take(experiment.sft_phase())
      origin = {"origin": {"phase": "sft", "steps": experiment.sft.steps}}
    params = take(experiment.phase(params), **origin)
    scores = experiment.score(params, "test", experiment.evaluation.final)
  report = {**summarize(experiment, scores), "wall_seconds": round(time.monotonic() - started, 1)}
  base.write_report(workdir, "reward_model", report, as_rows(report), experiment.config)
  print(table(report))
  return report


def summarize(experiment: Experiment, scores: PairScores) -> dict[str, Any]:
  """Turn the scores of held-out pairs into the report; a kind without a pair is left out."""
  of_kind = {"all": np.ones(len(scores.kinds), bool)} | {kind: scores.kinds == kind for kind in KINDS}
  right = {kind: scores.right[rows] for kind, rows in of_kind.items() if rows.any()}
  return {
    "accuracy": {kind: float(values.mean()) for kind, values in right.items()},
    "accuracy_interval": {kind: list(wilson_interval(int(x.sum()), len(x))) for kind, x in right.items()},
    "pairs": {kind: len(values) for kind, values in right.items()},
    "loss": scores.loss,
    # what a reward model would reach that prefers the longer conversation
    "longer": float(ranked_right(scores.lengths[:, 0] - scores.lengths[:, 1]).mean()),
    "reward": {name: float(expit(getattr(scores, name)).mean()) for name in ("chosen", "rejected")},
    "task": experiment.config["data"]["name"],
    "parameters": count_params(experiment.model)["total"],
    "block_pattern": experiment.model.to_dict()["block_pattern"],
    "seed": experiment.config["seed"],
  }


def value_names(experiment: Experiment) -> set[str]:
  """Return the names of the numbers that the report will have."""
  size, n = experiment.task.size("test"), experiment.evaluation.final
  kinds = np.array([experiment.pair("test", i)[1] for i in range(n if size is None else min(n, size))])
  nothing = np.zeros(len(kinds), np.float32)
  found = summarize(experiment, PairScores(nothing, nothing, kinds, np.zeros((len(kinds), 2))))
  return set(numbers(found)) | {"wall_seconds"}


def as_rows(report: Mapping[str, Any]) -> Iterator[list[Any]]:
  """Yield the header and one row per kind of pairs."""
  yield ["kind", "pairs", "accuracy", "low", "high"]
  for kind, interval in report["accuracy_interval"].items():
    yield [kind, report["pairs"][kind], *(f"{x:.4f}" for x in (report["accuracy"][kind], *interval))]


def table(report: Mapping[str, Any]) -> str:
  """Format the report for a terminal."""
  lines = [f"{'':10} {'pairs':>6} {'ranked rightly':>15}  95 % interval"]
  for kind, (low, high) in report["accuracy_interval"].items():
    lines.append(f"{kind:10} {report['pairs'][kind]:6} {report['accuracy'][kind]:15.3f}  [{low:.3f}, {high:.3f}]")
  reward = report["reward"]
  lines.append(
    f"loss {report['loss']:.3f}, mean reward {reward['chosen']:.3f} and {reward['rejected']:.3f}; "
    f"preferring the longer one: {report['longer']:.3f}; {report['wall_seconds']:.0f} s"
  )
  return "\n".join(lines)
