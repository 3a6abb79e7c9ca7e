"""The position-recall experiment: a small model with a memory, the same model without it, and full-context models.

Every condition answers the same paired questions, in which only the needed fact moves. The full-context models read the
whole context. They have the same size and the same first phase, and are then trained on long lists that ask for all
facts and for the last ones (free recall and running span, arXiv 2510.10276).
"""

import dataclasses
import time
from collections.abc import Collection, Mapping
from typing import Annotated, Any

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh

from selfrag_jax.checked import Checked, Count, Range
from selfrag_jax.experiments import self_rag
from selfrag_jax.experiments.base import announce, by_training, write_report
from selfrag_jax.experiments.recall import Curve, measure, recall_among, score, variance_change
from selfrag_jax.memory.store import MemoryStore
from selfrag_jax.metrics.position import compare
from selfrag_jax.metrics.statistics import bootstrap_interval
from selfrag_jax.model.config import ModelConfig, count_params
from selfrag_jax.reports import figures
from selfrag_jax.reports.page import write_page
from selfrag_jax.reports.recall_by_position import HELD_OUT, as_rows, checks, table
from selfrag_jax.reports.thresholds import numbers
from selfrag_jax.self_rag import SelfRAGModel
from selfrag_jax.settings import read_config, settings
from selfrag_jax.tasks.context_batch import ListKind, of_facts
from selfrag_jax.tasks.facts import ASKABLE, Facts
from selfrag_jax.train.load import LoadedModel
from selfrag_jax.train.memory_reader import MemoryReader
from selfrag_jax.train.phases.base import GradientPhase
from selfrag_jax.train.phases.pretrain import Pretrain, PretrainConfig
from selfrag_jax.train.telemetry import read_rows, seconds_spent
from selfrag_jax.typing import Params

# conditions of the model with memory: name -> (visibility of the chunks, whether the needed fact states another value)
CONDITIONS = {
  "memory": ("memory", False),
  "tail": ("tail", False),
  "head_tail": ("head_tail", False),
  "oracle": ("oracle", False),
  "random": ("random", False),
  "deleted": ("deleted", False),
  "changed": ("memory", True),
}
EXAMPLES = 4  # questions on the report page


@dataclasses.dataclass(frozen=True)
class RecallConfig(Checked):
  """Paired questions about a fact at each depth of contexts of several lengths."""

  n_facts: tuple[Count, ...] = (64, 1024)
  questions: tuple[Count, ...] = (200, 64)  # at each depth, for each number of facts
  full_questions: tuple[Count, ...] = (200, 6)  # the part for the full-context models, which are slow
  depths: Annotated[int, Range(4, 2**20)] = 16
  tokens: Count = 16_384  # tokens of contexts that are read at once

  def __post_init__(self):
    super().__post_init__()
    if not len(self.full_questions) == len(self.questions) == len(self.n_facts):
      raise ValueError(f"questions and full_questions must be as many numbers as n_facts {self.n_facts}, got {self}")
    if any(full > asked for full, asked in zip(self.full_questions, self.questions, strict=True)):
      raise ValueError(f"full_questions {self.full_questions} must not be more than questions {self.questions}")


@dataclasses.dataclass(frozen=True)
class FullContextConfig(self_rag.ListsConfig):
  """The training of the full-context models: their lists, and how each model differs from the section `model`."""

  text: tuple[ListKind, ...] = (ListKind(16), ListKind(64), ListKind(64, last=16))  # free recall, and a running span
  models: Mapping[str, Any] = dataclasses.field(default_factory=dict)


UNUSED = (*self_rag.UNUSED, "full_context.needed_loss")  # no later phase needs a loss


def sections(config: Mapping[str, Any]) -> dict[str, Any]:
  """Return the sections of a config, with one for each phase that it has."""
  return self_rag.sections(config) | {"full_context": FullContextConfig, "evaluation": RecallConfig}


@dataclasses.dataclass
class Experiment:
  """The phases of the model with memory, and the full-context models (`baselines`) that it is compared with."""

  base: self_rag.Experiment
  evaluation: RecallConfig
  pretrain: dict[str, PretrainConfig]  # the phases of pretraining
  full_context: FullContextConfig
  baselines: dict[str, MemoryReader]

  @property
  def mesh(self) -> Mesh:
    return self.base.mesh

  @property
  def model(self) -> ModelConfig:
    """The model with memory."""
    return self.base.model

  def task(self, n_facts: int) -> Facts:
    """Return the task with `n_facts` facts in a context."""
    task = self.base.data.task
    return Facts(task.variant, n_facts, task.seed)


def build(config: Mapping[str, Any]) -> Experiment:
  """Check a config and build its experiment. Raises ValueError with the fix for a wrong config."""
  read_config(config, sections({**config, "pretrain": None}))  # the full-context models need this section too
  full_context = settings(FullContextConfig, config["full_context"], "full_context")
  evaluation = settings(RecallConfig, config["evaluation"], "evaluation")
  pretrain = {
    name: settings(self_rag.PHASES[name], config[name], name) for name in self_rag.PRETRAINING if name in config
  }
  base = self_rag.build(config)
  baselines = {}
  for name, changes in full_context.models.items():
    model = settings(ModelConfig, {**base.model.to_dict(), **changes}, f"full_context.models.{name}")
    baselines[name] = base.reader._replace(model=model, ids=None)  # plain text, without [MEM] and [SEP]
  return Experiment(base, evaluation, pretrain, full_context, baselines)


def planned(experiment: Experiment) -> Mapping[str, GradientPhase]:
  """Make the phases of the training to compile them; none has what the one before it trains."""
  return self_rag.planned(experiment.base)


def dry_run(experiment: Experiment) -> None:
  """Print mesh, parameters, the memory that each compiled program needs, and the first batches of the phases."""
  self_rag.dry_run(experiment.base)


def value_names(experiment: Experiment) -> set[str]:
  """Return the names of the numbers that the report will have."""
  return set(numbers(outline(experiment)))


def outline(experiment: Experiment) -> dict[str, Any]:
  """Return a report with all keys that the config's report will have, in which all answers are wrong."""
  base, evaluation, baselines = experiment.base, experiment.evaluation, experiment.baselines
  policies = [*([base.start.metadata["phase"]] if base.start else []), *base.phases]
  wrong = np.zeros((2, evaluation.depths))
  curve = Curve(wrong, wrong, wrong, wrong, 0, 0).report()
  again = [name for name, reader in baselines.items() if "pretrain" not in policies or reader.model != base.model]
  pretrained = [f"{phase}_{name}" for name in again for phase in experiment.pretrain]
  trained = [*base.phases, *pretrained, *(f"full_{name}" for name in baselines)]
  report: dict[str, Any] = {
    **dict.fromkeys(("seed", "chance", "wall_seconds"), 0),
    "variant": base.data.task.variant,
    "n_facts": list(evaluation.n_facts),
    "parameters": dict.fromkeys(["memory", *(f"full_{name}" for name in baselines)], 0),
    "conditions": {name: dict(curve) for name in _conditions(experiment, policies)},
    "middle": {str(n): {"against": "", **compare(wrong, wrong)} for n in evaluation.n_facts if baselines},
    "tokens": dict.fromkeys(trained, 0),
  }
  if "memory" in policies:
    report["phase_3_variance"] = {"before": 0.0, "after": 0.0, "interval": [0.0, 0.0]}
    none = [0.0, 0.0]
    report["phase_2_loss"] = {"n": 0, "gold": 0.0, "random": 0.0, "none": 0.0}
    report["phase_2_loss"] |= {"gold_minus_random": none, "gold_minus_none": none}
  if base.data.task.variant in ASKABLE:
    report["recall_at_1"] = dict.fromkeys(policies, 0.0)
  return {**report, "checks": checks(report)}


def _conditions(experiment: Experiment, policies: Collection[str]) -> list[str]:
  """Return the names of the curves that are measured."""
  names = [*CONDITIONS, *(f"full_{name}" for name in experiment.baselines)]
  before = ["memory_before"] if "memory" in policies else []
  return [*names, *before, *(f"{name}_{n}" for n in experiment.evaluation.n_facts[1:] for name in names)]


def train_baseline(experiment: Experiment, name: str, workdir: epath.PathLike, params: Params | None) -> Params:
  """Train a full-context model: on the text of pretraining like the model with memory, then on long lists.

  `params`: those of the model with memory after phase 1, which a model of the same config takes over.
  """
  base, model = experiment.base, experiment.baselines[name].model
  common: Any = {"mesh": base.mesh, "seed": base.config["seed"]}
  take = by_training(workdir, base.loop, {**base.metadata, "model": model.to_dict()})
  if params is None or model != base.model:
    params, origin = None, {}
    for phase, config in experiment.pretrain.items():
      phase = f"{phase}_{name}"
      params = take(Pretrain(phase, base.rows(config), model, config, params=params, **common), **origin)
      origin = {"origin": {"phase": phase, "steps": config.steps}}
  config = experiment.full_context
  return take(Pretrain(f"full_{name}", base.rows(config), model, config, params=params, **common))


def run(experiment: Experiment, workdir: epath.PathLike) -> dict[str, Any]:
  """Train the phases of the model with memory; print and return the scores after the last one."""
  return self_rag.run(experiment.base, workdir)


def evaluate(experiment: Experiment, workdir: epath.PathLike) -> dict[str, Any]:
  """Train missing phases, measure every condition, and write `position_recall.json`, `.csv`, `.png` and `.html`."""
  workdir = epath.Path(workdir)
  started = time.monotonic() - seconds_spent(workdir)
  base = experiment.base
  announce(base.model, workdir)
  with jax.set_mesh(base.mesh):
    policies = self_rag.train_phases(base, workdir)
    first = policies.get("pretrain")
    full = {name: train_baseline(experiment, name, workdir, first) for name in experiment.baselines}
    curves = measure_all(experiment, policies, full)
    report = summarize(experiment, curves, policies)
    report["examples"] = examples(experiment, list(policies.values())[-1])
  report["tokens"] = tokens_of(workdir)
  report["wall_seconds"] = round(time.monotonic() - started, 1)
  report["checks"] = checks(report)
  write_report(workdir, "position_recall", report, as_rows(report), base.config)
  figures.accuracy_over_depth(workdir, report)
  write_page(workdir, report)
  print(table(report))
  return report


def measure_all(experiment: Experiment, policies: Mapping[str, Params], full: Mapping[str, Params]) -> dict[str, Curve]:
  """Measure every condition at every number of facts; the names for all numbers but the first end in the number.

  `memory_before` is the model with memory before its last phase.
  """
  base, evaluation, curves = experiment.base, experiment.evaluation, {}
  params = list(policies.values())[-1]
  for n, questions, of_full in zip(evaluation.n_facts, evaluation.questions, evaluation.full_questions, strict=True):
    suffix = "" if n == evaluation.n_facts[0] else f"_{n}"
    conditions: dict[str, Any] = {
      name: (base.reader, params, visibility, changed) for name, (visibility, changed) in CONDITIONS.items()
    }
    if not suffix and "memory" in policies:
      conditions["memory_before"] = (base.reader, policies["memory"], "memory", False)
    conditions |= {f"full_{name}": (experiment.baselines[name], full[name], "full", False) for name in full}
    for name, (reader, weights, visibility, changed) in conditions.items():
      curve = curves[name + suffix] = measure(
        reader,
        weights,
        experiment.task(n),
        visibility,
        questions=of_full if visibility == "full" else questions,
        depths=evaluation.depths,
        tokens=evaluation.tokens,
        changed=changed,
      )
      print(f"measured {name + suffix}: accuracy {curve.right.mean():.3f}", flush=True)
  return curves


def summarize(experiment: Experiment, curves: Mapping[str, Curve], policies: Mapping[str, Params]) -> dict[str, Any]:
  """Turn curves into the report: conditions, comparisons on the same questions, and the effect of each phase."""
  base, evaluation = experiment.base, experiment.evaluation
  lengths, readers = evaluation.n_facts, {"memory": base.reader}
  readers |= {f"full_{name}": reader for name, reader in experiment.baselines.items()}
  report: dict[str, Any] = {
    "variant": base.data.task.variant,
    "seed": base.config["seed"],
    "chance": base.data.task.chance,
    "n_facts": list(lengths),
    "depths": {str(n): experiment.task(n).depths(evaluation.depths).tolist() for n in lengths},
    "parameters": {name: count_params(reader.model)["total"] for name, reader in readers.items()},
    "conditions": {name: curve.report() for name, curve in curves.items()},
    "middle": {},
  }
  quarter = evaluation.depths // 4
  middle = lambda name: curves[name].right[:, quarter : evaluation.depths - quarter]
  for n in lengths if experiment.baselines else ():
    suffix = "" if n == lengths[0] else f"_{n}"
    best = max((name + suffix for name in readers if name != "memory"), key=lambda name: middle(name).mean())
    asked = len(middle(best))  # it answers only the first of the memory's questions
    report["middle"][str(n)] = {"against": best, **compare(middle("memory" + suffix)[:asked], middle(best))}
  if "memory_before" in curves:
    report["phase_3_variance"] = variance_change(curves["memory_before"], curves["memory"])
  if "memory" in policies:
    report["phase_2_loss"] = chunk_losses(experiment, policies["memory"])
  if base.data.task.variant in ASKABLE:
    facts = experiment.task(HELD_OUT)
    report["recall_at_1"] = {
      name: float(recall_among(base.reader, params, facts).mean()) for name, params in policies.items()
    }
  return report


def chunk_losses(experiment: Experiment, params: Params) -> dict[str, Any]:
  """Compare the loss of answers after the needed chunks, after as many random chunks, and after no chunk."""
  base = experiment.base
  batch = of_facts(experiment.task(experiment.evaluation.n_facts[0]).lists("test", range(HELD_OUT)))
  reader = base.reader._replace(config=dataclasses.replace(base.reader.config, top_k=batch.gold.shape[2]))
  visibilities: Any = {"gold": "oracle", "random": "random", "none": "none"}
  losses = {name: score(reader, params, batch, visibility).loss for name, visibility in visibilities.items()}
  return {
    "n": HELD_OUT,
    **{name: float(loss.mean()) for name, loss in losses.items()},
    "gold_minus_random": list(bootstrap_interval(losses["gold"] - losses["random"])),
    "gold_minus_none": list(bootstrap_interval(losses["gold"] - losses["none"])),
  }


def examples(experiment: Experiment, params: Params) -> list[dict[str, Any]]:
  """Answer a few questions; return each with the chunks before it, their place and similarity."""
  base, n_facts = experiment.base, experiment.evaluation.n_facts[0]
  task, rag_config = experiment.task(n_facts), base.reader.config
  loaded = LoadedModel(base.model, params, {}, base.data.tokenizer)
  store = MemoryStore(base.model.d_model, rag_config.max_chunks, chunk_size=rag_config.chunk_size, backend="numpy",
    metric=rag_config.metric)  # fmt: skip
  rag, decode, found = SelfRAGModel(loaded, store, rag_config), base.data.tokenizer.decode, []
  for index, place in enumerate(task.depths(EXAMPLES).tolist()):
    episode = task.episodes("test", [index], [place])
    store.clear()
    for position, (ids, n) in enumerate(zip(episode.facts[0], episode.lengths[0], strict=True)):
      rag.write_to_memory(decode(ids[:n]), {"place": position})
    question, needed = decode(episode.questions[0]), set(episode.needed[0].tolist())
    [answer] = rag.generate([question], max_new_tokens=episode.answers.shape[1])
    chunks = [
      {"text": c.text, "place": c.metadata["place"], "score": c.score, "needed": c.metadata["place"] in needed}
      for c in answer.retrieved
    ]
    found.append({"question": question, "answer": answer.text, "right": decode(episode.answers[0]), "chunks": chunks})
  return found


def tokens_of(workdir: epath.Path) -> dict[str, int]:
  """Return the number of tokens that each phase was trained on."""
  tokens: dict[str, float] = {}
  for row in read_rows(workdir):
    tokens[row["phase"]] = tokens.get(row["phase"], 0) + (row.get("tokens") or 0)
  return {phase: int(n) for phase, n in tokens.items()}
