"""The experiment of the Self-RAG memory in three phases: pretraining, training with memory, recall from any position.

The phase `pairs` may come before them: recall forms on lists of names with their codes before sentences are read.
A config has one section for each phase that it trains. `init` names the workdir of an earlier run: the training goes on
from the model of that run's last phase, with the phases that follow it.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh

from selfrag_jax.aot.table import print_plan
from selfrag_jax.checked import Checked, Count, Range, Seed
from selfrag_jax.experiments.base import TRAINED, TakePhase, announce, by_reading, make_model, metadata, write_report
from selfrag_jax.experiments.recall import measure, score
from selfrag_jax.generate.augment import memory_tokens
from selfrag_jax.mesh import check_shards, make_mesh
from selfrag_jax.model.config import ModelConfig, count_params
from selfrag_jax.reports.thresholds import numbers
from selfrag_jax.self_rag import SelfRAGConfig
from selfrag_jax.settings import read_config, settings
from selfrag_jax.tasks.context_batch import FactData, FactText, ListKind
from selfrag_jax.tasks.facts import Facts
from selfrag_jax.tasks.text import TextData
from selfrag_jax.text.chat import visualize_tokenization
from selfrag_jax.text.registry import open_tokenizer
from selfrag_jax.text.tokenizer import Tokenizer
from selfrag_jax.train.load import LoadedModel, load_model
from selfrag_jax.train.loop import LoopConfig, Phase, TrainingError, checkpoints, train
from selfrag_jax.train.memory_reader import MemoryReader
from selfrag_jax.train.phases.base import GradientPhase
from selfrag_jax.train.phases.memory import MemoryPhase, MemoryPhaseConfig
from selfrag_jax.train.phases.pretrain import Pretrain, PretrainConfig, Rows
from selfrag_jax.typing import Params


@dataclasses.dataclass(frozen=True)
class FactsData(Checked):
  """Lists of facts, made as they are needed: contexts to remember, and `text` to pretrain on."""

  name: str
  text: tuple[ListKind, ...]  # the kinds of lists take turns
  variant: str = "kv"
  n_facts: Count = 128  # in a context
  n_questions: Count = 16  # about a context
  seed: Seed = 0


@dataclasses.dataclass(frozen=True)
class TextFiles(Checked):
  """Text files to pretrain on and to remember."""

  name: str
  path: str = ""
  tokenizer: str = "byte"  # or a SentencePiece .model file, or a folder with the tokenizer.json of a byte-level BPE
  row_tokens: Annotated[int, Range(2, 2**24)] = 256
  n_chunks: Count = 16  # in a context to remember
  chunk_tokens: Annotated[int, Range(4, 2**24)] = 32
  seed: Seed = 0


@dataclasses.dataclass(frozen=True)
class ListsConfig(PretrainConfig):
  """Pretraining on lists of its own; by default on pairs of a name and a code, from which recall forms soonest."""

  text: tuple[ListKind, ...] = (
    ListKind(4, variant="kv"),
    ListKind(8, variant="kv"),
    ListKind(16, variant="kv"),
    ListKind(16, alike=True, variant="kv"),
  )


PHASES: dict[str, type] = {
  "pairs": ListsConfig,
  "pretrain": PretrainConfig,
  "memory": MemoryPhaseConfig,
  "position_recall": MemoryPhaseConfig,
}
SECTIONS = {
  **TRAINED,
  "data": {"facts": FactsData, "text": TextFiles},
  "model": Mapping,
  "self_rag": SelfRAGConfig,
  "loop": LoopConfig,
}
PRETRAINING = ("pairs", "pretrain")
UNUSED = ("self_rag.d_model", "self_rag.n_layers", "self_rag.n_heads")  # the section `model` describes the model
# the scores of a reader on held-out contexts of facts, and of text
FACT_SCORES, TEXT_SCORES = ("accuracy", "recall_at_1", "loss"), ("loss", "loss_given_gold", "loss_without")


def sections(config: Mapping[str, Any]) -> dict[str, Any]:
  """Return the sections of a config, with one for each phase that it has."""
  return SECTIONS | {name: cls for name, cls in PHASES.items() if name in config}


@dataclasses.dataclass
class Experiment:
  """A config and the objects built from it.

  `phases`: the settings of each phase that is left to train, in the order of training. `start`: the model that the
  first phase starts from; None: from scratch.
  """

  config: dict[str, Any]
  mesh: Mesh
  data: FactData | TextData
  model: ModelConfig
  reader: MemoryReader
  start: LoadedModel | None
  phases: dict[str, Any]
  loop: LoopConfig

  @property
  def metadata(self) -> dict[str, Any]:
    """The metadata of a checkpoint."""
    return metadata(self.config, self.model, self.data.tokenizer)

  def phase(self, name: str, params: Params | None) -> Pretrain | MemoryPhase:
    """Make a phase that starts from `params` (None: from scratch)."""
    common: Any = {"mesh": self.mesh, "seed": self.config["seed"], "params": params}
    if name in PRETRAINING:
      return Pretrain(name, self.rows(self.phases[name]), self.model, self.phases[name], **common)
    if params is None:
      raise ValueError(f"phase {name} trains a model that can read: add a section pretrain, or set init to a workdir")
    if name == "position_recall" and isinstance(self.data, TextData):
      raise ValueError("phase position_recall asks about facts: config.data.name is 'text'; leave the phase out")
    seen = 0
    if name == "position_recall" and "memory" in self.phases:  # contexts that no earlier phase has seen
      seen = self.phases["memory"].steps * self.phases["memory"].batch_size
    demand = "recent" if name == "memory" else "even"
    contexts = lambda rows: self.data.contexts("train", [seen + row for row in rows], demand)
    return MemoryPhase(name, contexts, self.reader, self.phases[name], evaluate=self.validate, **common)

  def rows(self, config: PretrainConfig) -> Callable[[str, Sequence[int]], Rows]:
    """Return the rows of a phase of pretraining: its own lists, or the text of the data."""
    if not isinstance(config, ListsConfig):
      return self.data.rows
    if isinstance(self.data, TextData):
      raise ValueError("phase pairs trains on lists of facts: config.data.name is 'text'; leave the phase out")
    return FactText(self.data.task.variant, config.text, self.data.task.seed).rows

  def planned(self) -> dict[str, Pretrain | MemoryPhase]:
    """Make all phases, each from the shapes of the parameters of the phase before."""
    phases: dict[str, Pretrain | MemoryPhase] = {}
    params = self.start.params if self.start else None
    for name in self.phases:
      phases[name] = self.phase(name, params)
      params = phases[name].abstract_state().params
    return phases

  def validate(self, params: Params) -> dict[str, float]:
    """Score a reader on a few held-out contexts: facts at 8 depths, or text with memory, gold chunks and no memory."""
    if isinstance(self.data, TextData):
      batch = self.data.contexts("valid", range(64))
      visibilities: Any = {"loss": "memory", "loss_given_gold": "oracle", "loss_without": "none"}
      return {name: float(score(self.reader, params, batch, seen).loss.mean()) for name, seen in visibilities.items()}
    curve = measure(self.reader, params, self.data.task, "memory", questions=32, depths=8)
    scores = {"accuracy": curve.right, "recall_at_1": curve.first, "loss": curve.loss}
    return {name: float(values.mean()) for name, values in scores.items()}


def build(config: Mapping[str, Any]) -> Experiment:
  """Check a config (nested dicts) and build its experiment. Raises ValueError with the fix for a wrong config."""
  config = read_config(config, sections(config))
  mesh = make_mesh(**config["mesh"])
  data = _make_data(config["data"])
  model = make_model({"vocab_size": data.tokenizer.vocab_size, **config["model"]}, mesh)
  rag = settings(SelfRAGConfig, config["self_rag"], "self_rag")
  if data.chunk_tokens > rag.chunk_size:
    raise ValueError(f"chunks have up to {data.chunk_tokens} tokens, self_rag.chunk_size is {rag.chunk_size}")
  phases: dict[str, Any] = {name: settings(cls, config[name], name) for name, cls in PHASES.items() if name in config}
  start = _load_start(config["init"], data, model, mesh) if config["init"] else None
  if start:
    names = list(PHASES)
    phases = {name: phases[name] for name in phases if names.index(name) > names.index(start.metadata["phase"])}
    if not phases:
      raise ValueError(f"{config['init']} has gone through phase {start.metadata['phase']}: nothing is left to train")
  reader = MemoryReader(model, rag, memory_tokens(data.tokenizer), mesh)
  loop = settings(LoopConfig, config["loop"], "loop")
  experiment = Experiment(config, mesh, data, model, reader, start, phases, loop)
  with jax.set_mesh(mesh):  # phases check their batches: an error in the last comes now, not after hours of the first
    for phase in experiment.planned().values():
      phase.batch(0)
      check_shards(phase.abstract_state())
  return experiment


def make_tokenizer(section: Mapping[str, Any]) -> Tokenizer:
  """Return the tokenizer that the section `data` of a config names."""
  return Facts(section["variant"]).tokenizer if section["name"] == "facts" else open_tokenizer(section["tokenizer"])


def _make_data(section: Mapping[str, Any]) -> FactData | TextData:
  made: Any = settings(SECTIONS["data"][section["name"]], section, "data")
  options = {name: value for name, value in vars(made).items() if name != "name"}
  if section["name"] == "facts":
    return FactData(**options)
  return TextData(**{**options, "tokenizer": open_tokenizer(options["tokenizer"])})


def last_phase(workdir: epath.PathLike) -> str | None:
  """Return the last phase with checkpoints in a workdir, which may hold other models too; None if there is none."""
  return next((phase for phase in reversed(PHASES) if checkpoints(workdir, phase).exists()), None)


def _load_start(workdir: str, data: FactData | TextData, model: ModelConfig, mesh: Mesh) -> LoadedModel:
  if not (phase := last_phase(workdir)):
    raise ValueError(f"{workdir} has no checkpoints of {', '.join(PHASES)}; set init to the workdir of such a phase")
  return load_model(workdir, phase, tokenizer=data.tokenizer, model=model, mesh=mesh)


class NotLearnedError(TrainingError):
  """A phase has ended with a loss that is too high for the next phase."""


def train_phases(experiment: Experiment, workdir: epath.PathLike) -> dict[str, Params]:
  """Train the phases one after the other, each from its newest checkpoint; return the parameters after each.

  Raises NotLearnedError if a phase ends with a validation loss above its `needed_loss`.
  """

  def take(phase: Phase, **origin: Any) -> Params:
    name, config = phase.name, experiment.phases[phase.name]
    state = train(phase, workdir, experiment.loop, {**experiment.metadata, **origin})
    if config.needed_loss and (loss := phase.evaluate(state)["loss"]) > config.needed_loss:
      raise NotLearnedError(
        f"phase {name} ended after {config.steps} steps with a validation loss of {loss:.3f}, the next one needs "
        f"{config.needed_loss:g} (config.{name}.needed_loss): run again with more config.{name}.steps to go on"
      )
    return state.params

  return _policies(experiment, take)


def _policies(experiment: Experiment, take: TakePhase) -> dict[str, Params]:
  """Return the parameters after each phase, including the phase that the run starts from."""
  policies: dict[str, Params] = {}
  params, origin = None, {}
  if experiment.start:
    phase = experiment.start.metadata["phase"]
    params, origin = experiment.start.params, {"origin": {"phase": phase, "workdir": experiment.config["init"]}}
    policies[phase] = params
  for name, config in experiment.phases.items():
    params = policies[name] = take(experiment.phase(name, params), **origin)
    origin = {"origin": {"phase": name, "steps": config.steps}}
  return policies


def run(experiment: Experiment, workdir: epath.PathLike) -> dict[str, Any]:
  """Train the phases; print and return the scores after the last one."""
  announce(experiment.model, workdir)
  with jax.set_mesh(experiment.mesh):
    scores = experiment.validate(list(train_phases(experiment, workdir).values())[-1])
  print(_line(scores))
  return scores


def evaluate(experiment: Experiment, workdir: epath.PathLike) -> dict[str, Any]:
  """Score the final parameters of each phase on held-out contexts; write `self_rag.json` and `.csv`."""
  announce(experiment.model, workdir)
  with jax.set_mesh(experiment.mesh):
    policies = _policies(experiment, by_reading(workdir, experiment.metadata))
    scores = {name: experiment.validate(params) for name, params in policies.items()}
  report = {**_facts(experiment), "scores": scores}
  rows = [["phase", *_scored(experiment)], *([name, *of.values()] for name, of in scores.items())]
  write_report(epath.Path(workdir), "self_rag", report, rows, experiment.config)
  print(*(f"{name}: {_line(of)}" for name, of in scores.items()), sep="\n")
  return report


def value_names(experiment: Experiment) -> set[str]:
  """Return the names of the numbers that the report will have."""
  phases = [*([experiment.start.metadata["phase"]] if experiment.start else []), *experiment.phases]
  scores = dict.fromkeys(phases, dict.fromkeys(_scored(experiment), 0.0))
  return set(numbers({**_facts(experiment), "scores": scores}))


def _facts(experiment: Experiment) -> dict[str, Any]:
  config, parameters = experiment.config, count_params(experiment.model)["total"]
  return {"data": config["data"]["name"], "seed": config["seed"], "parameters": parameters}


def _scored(experiment: Experiment) -> tuple[str, ...]:
  return TEXT_SCORES if isinstance(experiment.data, TextData) else FACT_SCORES


def _line(scores: Mapping[str, float]) -> str:
  return "  ".join(f"{name} {value:.3f}" for name, value in scores.items())


def planned(experiment: Experiment) -> Mapping[str, GradientPhase]:
  """Make the phases to compile them; none has what the one before it trains."""
  return experiment.planned()


def dry_run(experiment: Experiment) -> None:
  """Print mesh, parameters, the memory that each compiled program needs, and the first batches, decoded."""
  with jax.set_mesh(experiment.mesh):
    phases = experiment.planned()
    print_plan(experiment.mesh, experiment.model, phases)
  show = lambda ids, mask: visualize_tokenization(experiment.data.tokenizer, ids, mask, color=False)
  for name, phase in phases.items():
    batch: Any = phase.batch(0)
    print(f"first row of phase {name} («…» is predicted):")
    if isinstance(phase, Pretrain):
      n = np.count_nonzero(batch["segment_ids"][0])
      print(show(batch["tokens"][0, :n], batch["mask"][0, :n]))
      continue
    chunk, n, asked = batch.chunks[0, 0, : batch.chunk_lengths[0, 0]], batch.lengths[0, 0], batch.query_lengths[0, 0]
    print(f"{batch.chunks.shape[1]} chunks such as {show(chunk, np.zeros_like(chunk))}")
    print(show(batch.inputs[0, 0, :n], np.arange(n) >= asked))
