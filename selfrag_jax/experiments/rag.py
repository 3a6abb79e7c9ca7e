"""The RAG experiment: a model is fine-tuned on questions beside retrieved documents, then asked with and without them.

The conditions of the report differ in the documents of the prompt alone: those that were retrieved, none, those of
another question, and retrieved documents whose facts were changed, whose new answers a model that reads will follow.
"""

import dataclasses
import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh

from selfrag_jax.aot import print_plan
from selfrag_jax.checked import Checked, Count, Natural, Range, Seed, Share
from selfrag_jax.experiments import base
from selfrag_jax.experiments.chat_model import ChatModel
from selfrag_jax.mesh import check_shards, make_mesh
from selfrag_jax.metrics.statistics import wilson_interval
from selfrag_jax.model.config import ModelConfig, count_params
from selfrag_jax.reports.thresholds import numbers
from selfrag_jax.settings import read_config, settings
from selfrag_jax.tasks.countries import Countries
from selfrag_jax.tasks.rag import show
from selfrag_jax.tasks.task import Task
from selfrag_jax.text.chat import COMPACT, render_conversation, visualize_tokenization
from selfrag_jax.train.load import LoadedModel
from selfrag_jax.train.loop import LoopConfig
from selfrag_jax.train.phases.conversations import ConversationConfig, ConversationPhase, Rendered
from selfrag_jax.train.telemetry import seconds_spent
from selfrag_jax.typing import Params


@dataclasses.dataclass(frozen=True)
class CountriesData(Checked):
  """The embedded task: countries that do not exist, each question beside the documents found in its own world."""

  name: str
  n_countries: Annotated[int, Range(2, 200)] = 12
  retriever: str = "bm25"
  top_k: Count = 5
  unanswerable: Share = 0.1  # of the training's questions: the document that answers is missing
  seed: Seed = 0


@dataclasses.dataclass(frozen=True)
class ReadingConfig(ConversationConfig):
  """Language modelling on whole conversations, documents included, from which a fresh model learns to copy."""

  steps: Natural = 0


@dataclasses.dataclass(frozen=True)
class RAGConfig(ConversationConfig):
  """Fine-tuning on answers. `documents`: what the prompts show; `none` and `shuffled` are controls."""

  documents: Literal["retrieved", "none", "shuffled"] = "retrieved"


@dataclasses.dataclass(frozen=True)
class EvalConfig(Checked):
  """Greedy evaluation: `periodic` questions while training, `final` for the report."""

  periodic: Count = 128
  final: Count = 512
  batch_size: Count = 64
  max_new_tokens: Count = 8


OWN = {"pretrain": ReadingConfig, "rag": RAGConfig, "evaluation": EvalConfig, "loop": LoopConfig}
SECTIONS = {**base.TRAINED, "data": {"countries": CountriesData}, "model": Mapping, **OWN}
ENDLESS = 2**31 - 1  # questions of the embedded task's training
CONDITIONS = {
  "retrieved": "the documents that were retrieved",
  "none": "no documents",
  "shuffled": "the documents of another question",
  "edited": "retrieved documents with changed facts: the share that follows them",
  "missing": 'retrieved documents without the one that answers: the share of "I don\'t know"',
}


@dataclasses.dataclass
class Experiment:
  """A config and the objects built from it."""

  config: dict[str, Any]
  mesh: Mesh
  countries: Countries
  model: ModelConfig
  pretrain: ReadingConfig
  rag: RAGConfig
  evaluation: EvalConfig
  loop: LoopConfig

  def __post_init__(self):
    self.tokenizer = self.countries.tokenizer

  @property
  def metadata(self) -> dict[str, Any]:
    """The metadata of a checkpoint."""
    return base.metadata(self.config, self.model, self.tokenizer)

  def task(self, split: str, n: int, condition: str) -> Task:
    """Return the questions of a split under a condition of the report."""
    more = self.countries.per_world  # the last questions get the documents of the world after theirs
    edited, missing = condition == "edited", float(condition == "missing")
    task = self.countries.task(split, n + more, edited=edited, unanswerable=missing)
    return (show(task, condition, more) if condition in ("none", "shuffled") else task)[:n]

  def phase(self, name: str, params: Params | None) -> ConversationPhase:
    """Make a phase that starts from `params` (None: from scratch)."""
    config: Any = getattr(self, name)
    whole, missing = name == "pretrain", self.config["data"]["unanswerable"]
    task = self.countries.task("train", ENDLESS, unanswerable=missing)
    task = task if whole else show(task, config.documents, self.countries.per_world)

    def render(index: int) -> Rendered:
      ids, mask = render_conversation(self.tokenizer, task[index], COMPACT)
      return ids, [1] * len(ids) if whole else mask

    return ConversationPhase(
      name,
      render,
      None,
      self.tokenizer.special["<|pad|>"],
      self.model,
      config,
      mesh=self.mesh,
      seed=self.config["seed"],
      params=params,
      evaluate=lambda params: {"em": float(self.score(params, "valid", self.evaluation.periodic, "retrieved").mean())},
    )

  def phases(self) -> list[str]:
    """Return the names of the phases, in the order of training."""
    return [*(["pretrain"] if self.pretrain.steps else []), "rag"]

  def score(self, params: Params, split: str, n: int, condition: str) -> np.ndarray:
    """Score the greedy answers to the first `n` questions, f32 [n]."""
    task = self.task(split, n, condition)
    model = ChatModel(LoadedModel(self.model, params, {}, self.tokenizer), "the model", COMPACT, bucket=32)
    section = self.evaluation
    answers = model.answer(
      [row["messages"] for row in task], max_new_tokens=section.max_new_tokens, batch_size=section.batch_size
    )
    return np.array([task.evaluate(row, answer.text) for row, answer in zip(task, answers, strict=True)], np.float32)


def build(config: Mapping[str, Any]) -> Experiment:
  """Check a config (nested dicts) and build its experiment. Raises ValueError with the fix for a wrong config."""
  config = read_config(config, SECTIONS)
  mesh = make_mesh(**config["mesh"])
  sections: dict[str, Any] = {name: settings(cls, config[name], name) for name, cls in OWN.items()}
  data = settings(CountriesData, config["data"], "data")
  countries = Countries(**{name: value for name, value in vars(data).items() if name not in ("name", "unanswerable")})
  model = base.make_model({"vocab_size": countries.tokenizer.vocab_size, **config["model"]}, mesh)
  experiment = Experiment(config, mesh, countries, model, **sections)
  with jax.set_mesh(mesh):  # phases check their batches: an error in the last comes now, not after hours of the first
    for name in experiment.phases():
      phase = experiment.phase(name, None)
      phase.batch(0)
      check_shards(phase.abstract_state())
  return experiment


def dry_run(experiment: Experiment) -> None:
  """Print mesh, parameters, the memory that each compiled program needs, and the first conversation, decoded."""
  with jax.set_mesh(experiment.mesh):
    phases = {name: experiment.phase(name, None) for name in experiment.phases()}
    print_plan(experiment.mesh, experiment.model, phases)
  batch = phases["rag"].batch(0)
  n = int((batch["segment_ids"][0] == 1).sum())
  print("first conversation of phase rag («…» is trained on):")
  print(visualize_tokenization(experiment.tokenizer, batch["tokens"][0, :n], batch["mask"][0, :n], color=False))


def run(experiment: Experiment, workdir: epath.PathLike) -> dict[str, Any]:
  """Train the phases, each from its newest checkpoint, then evaluate; write `rag.json` and `.csv`."""
  return _report(experiment, workdir, base.by_training(workdir, experiment.loop, experiment.metadata))


def evaluate(experiment: Experiment, workdir: epath.PathLike) -> dict[str, Any]:
  """Report as `run` does, but from the checkpoints of the last steps."""
  return _report(experiment, workdir, base.by_reading(workdir, experiment.metadata))


def _report(experiment: Experiment, workdir: epath.PathLike, take: base.TakePhase) -> dict[str, Any]:
  workdir = epath.Path(workdir)
  started = time.monotonic() - seconds_spent(workdir)
  base.announce(experiment.model, workdir)
  with jax.set_mesh(experiment.mesh):
    params, origin, scores = None, {}, {}
    for name in experiment.phases():
      params = take(experiment.phase(name, params), **origin)
      origin = {"origin": {"phase": name, "steps": getattr(experiment, name).steps}}
      scores[name] = {
        condition: experiment.score(params, "test", experiment.evaluation.final, condition) for condition in CONDITIONS
      }
  report = summarize(experiment, scores) | {"wall_seconds": round(time.monotonic() - started, 1)}
  base.write_report(workdir, "rag", report, as_rows(report), experiment.config)
  print(table(report))
  return report


def summarize(experiment: Experiment, scores: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, Any]:
  """Turn scores into the report."""
  interval = lambda right: list(wilson_interval(int(right.sum()), len(right)))
  return {
    "em": {name: {key: float(right.mean()) for key, right in of.items()} for name, of in scores.items()},
    "em_interval": {name: {key: interval(right) for key, right in of.items()} for name, of in scores.items()},
    "documents": experiment.rag.documents,
    "n": experiment.evaluation.final,
    "parameters": count_params(experiment.model)["total"],
    "block_pattern": experiment.model.to_dict()["block_pattern"],
    "seed": experiment.config["seed"],
  }


def value_names(experiment: Experiment) -> set[str]:
  """Return the names of the numbers that the report will have."""
  nothing = dict.fromkeys(experiment.phases(), dict.fromkeys(CONDITIONS, np.zeros(1)))
  return set(numbers(summarize(experiment, nothing))) | {"wall_seconds"}


def as_rows(report: Mapping[str, Any]) -> Iterator[list[Any]]:
  """Yield the header and one row per phase and condition."""
  yield ["after", "documents", "em", "low", "high"]
  for phase, scores in report["em"].items():
    for condition, em in scores.items():
      yield [phase, condition, *(f"{x:.4f}" for x in (em, *report["em_interval"][phase][condition]))]


def table(report: Mapping[str, Any]) -> str:
  """Format the report for a terminal."""
  lines = [f"{'after':10}{'documents':12}{'EM':>6}  95 % interval"]
  for phase, scores in report["em"].items():
    for condition, em in scores.items():
      low, high = report["em_interval"][phase][condition]
      lines.append(f"{phase:10}{condition:12}{em:6.3f}  [{low:.3f}, {high:.3f}]   {CONDITIONS[condition]}")
  return "\n".join([*lines, f"n = {report['n']}, {report['wall_seconds']:.0f} s"])
