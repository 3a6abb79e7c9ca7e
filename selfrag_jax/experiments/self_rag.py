"""The Self-RAG memory's three phases, from a config: pretrain, train with memory, train to recall from any position.

A config has the sections of the phases that it trains. `init` names the workdir of an earlier run: the phases after its
last one are trained, from where that left the model.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh

from selfrag_jax.aot import print_plan
from selfrag_jax.experiments.recall import measure, score
from selfrag_jax.experiments.sections import TRAINED, FactsData, TextFiles
from selfrag_jax.generate.augment import memory_tokens
from selfrag_jax.mesh import check_shards, make_mesh
from selfrag_jax.model.config import ModelConfig, count_params
from selfrag_jax.self_rag import SelfRAGConfig
from selfrag_jax.settings import read_config, settings
from selfrag_jax.tasks.context_batch import FactData
from selfrag_jax.tasks.facts import Facts
from selfrag_jax.tasks.text import TextData
from selfrag_jax.text.chat import visualize_tokenization
from selfrag_jax.text.registry import open_tokenizer
from selfrag_jax.text.tokenizer import Tokenizer
from selfrag_jax.train.load import LoadedModel, load_model
from selfrag_jax.train.loop import LoopConfig, checkpoints, train
from selfrag_jax.train.memory_reader import MemoryReader
from selfrag_jax.train.phases.memory import MemoryPhase, MemoryPhaseConfig
from selfrag_jax.train.phases.pretrain import Pretrain, PretrainConfig
from selfrag_jax.typing import Params

PHASES: dict[str, type] = {
  "pretrain": PretrainConfig,
  "memory": MemoryPhaseConfig,
  "position_recall": MemoryPhaseConfig,
}
CHECKED = {
  **TRAINED,
  "data": {"facts": FactsData, "text": TextFiles},
  "model": Mapping,
  "self_rag": SelfRAGConfig,
  "loop": LoopConfig,
}


@dataclasses.dataclass
class Experiment:
  """Everything that a config describes; `phases` are the settings of those that are left to train, in their order.

  `start` is what the first of them starts from; None: from scratch.
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
    """What a checkpoint says about itself."""
    tokenizer = self.data.tokenizer
    return {
      "config": self.config,
      "model": self.model.to_dict(),
      "tokenizer": {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint},
    }

  def phase(self, name: str, params: Params | None) -> Pretrain | MemoryPhase:
    """Make a phase that starts from `params` (None: from scratch)."""
    common: Any = {"mesh": self.mesh, "seed": self.config["seed"], "params": params}
    if name == "pretrain":
      return Pretrain(name, self.data.rows, self.model, self.phases[name], **common)
    if params is None:
      raise ValueError(f"phase {name} trains a model that can read: add a section pretrain, or set init to a workdir")
    if name == "position_recall" and isinstance(self.data, TextData):
      raise ValueError("phase position_recall asks about facts: config.data.name is 'text'; leave the phase out")
    size, seen = self.phases[name].batch_size, 0
    if name == "position_recall" and "memory" in self.phases:  # contexts that no earlier phase has seen
      seen = self.phases["memory"].steps * self.phases["memory"].batch_size
    demand = "recent" if name == "memory" else "even"
    contexts = lambda step: self.data.contexts("train", range(seen + step * size, seen + (step + 1) * size), demand)
    return MemoryPhase(name, contexts, self.reader, self.phases[name], evaluate_reader=self.validate, **common)

  def planned(self) -> dict[str, Pretrain | MemoryPhase]:
    """Make the phases as they will run, each from the shapes that the one before leaves."""
    phases: dict[str, Pretrain | MemoryPhase] = {}
    params = self.start.params if self.start else None
    for name in self.phases:
      phases[name] = self.phase(name, params)
      params = phases[name].abstract_state().params
    return phases

  def validate(self, params: Params) -> dict[str, float]:
    """Score a reader on a few held-out contexts: of facts at every depth, of text beside the same without memory."""
    if isinstance(self.data, TextData):
      batch = self.data.contexts("valid", range(64))
      visibilities: Any = {"loss": "memory", "loss_given_gold": "oracle", "loss_without": "none"}
      return {name: float(score(self.reader, params, batch, seen).loss.mean()) for name, seen in visibilities.items()}
    curve = measure(self.reader, params, self.data.task, "memory", questions=32, depths=8)
    scores = {"accuracy": curve.right, "recall_at_1": curve.first, "loss": curve.loss}
    return {name: float(values.mean()) for name, values in scores.items()}


def build(config: Mapping[str, Any]) -> Experiment:
  """Check a config (nested dicts) and build what it describes. Raises ValueError with the fix where it does not fit."""
  config = read_config(config, CHECKED | {name: cls for name, cls in PHASES.items() if name in config})
  mesh = make_mesh(config["mesh"])
  data = _make_data(config["data"])
  fields = {"vocab_size": data.tokenizer.vocab_size, **config["model"]}
  if fields.get("dtype") == "auto":
    fields["dtype"] = "float32" if mesh.devices.flat[0].platform == "cpu" else "bfloat16"
  model = settings(ModelConfig, fields, "model")
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
  with jax.set_mesh(mesh):  # the phases check their batches: the last one now, not after hours of the first
    for phase in experiment.planned().values():
      phase.batch(0)
      check_shards(phase.abstract_state())
  return experiment


def make_tokenizer(section: Mapping[str, Any]) -> Tokenizer:
  """Return the tokenizer of the section `data` of a config."""
  return Facts(section["variant"]).tokenizer if section["name"] == "facts" else open_tokenizer(section["tokenizer"])


def _make_data(section: Mapping[str, Any]) -> FactData | TextData:
  options = {key: value for key, value in section.items() if key != "name"}
  if section["name"] == "facts":
    return FactData(**options)
  return TextData(**{**options, "tokenizer": make_tokenizer(section)})


def last_phase(workdir: epath.PathLike) -> str | None:
  """Return the last of the phases that a workdir has checkpoints of; other models may lie beside them."""
  return next((phase for phase in reversed(PHASES) if checkpoints(workdir, phase).exists()), None)


def _load_start(workdir: str, data: FactData | TextData, model: ModelConfig, mesh: Mesh) -> LoadedModel:
  if not (phase := last_phase(workdir)):
    raise ValueError(f"{workdir} has no checkpoints of {', '.join(PHASES)}; set init to the workdir of such a phase")
  loaded = load_model(workdir, phase, tokenizer=data.tokenizer, mesh=mesh)
  if loaded.config != model:
    raise ValueError(f"{workdir} holds the model {loaded.config}, not {model}")
  return loaded


class NotLearnedError(RuntimeError):
  """A phase has ended without what the next one builds on."""


def train_phases(experiment: Experiment, workdir: epath.PathLike) -> dict[str, Params]:
  """Train the phases one after the other, each from its newest checkpoint; return the parameters after each.

  Raises NotLearnedError where a phase ends below what its settings say that the next one needs.
  """
  policies: dict[str, Params] = {}
  params, origin = None, {}
  if experiment.start:
    phase = experiment.start.metadata["phase"]
    params, origin = experiment.start.params, {"origin": {"phase": phase, "workdir": experiment.config["init"]}}
    policies[phase] = params
  for name, config in experiment.phases.items():
    metadata = {**experiment.metadata, **origin}
    phase = experiment.phase(name, params)
    state = train(phase, workdir, experiment.loop, metadata)
    if config.needed_loss and (loss := phase.evaluate(state)["loss"]) > config.needed_loss:
      raise NotLearnedError(
        f"phase {name} ended after {config.steps} steps with a validation loss of {loss:.3f}, the next one needs "
        f"{config.needed_loss:g} (config.{name}.needed_loss): run again with more config.{name}.steps, it goes on"
      )
    params = policies[name] = state.params
    origin = {"origin": {"phase": name, "steps": config.steps}}
  return policies


def run(experiment: Experiment, workdir: epath.PathLike) -> dict[str, Any]:
  """Train the phases and print how well the last one reads."""
  print(f"{count_params(experiment.model)['total']:,} parameters, workdir {workdir}", flush=True)
  with jax.set_mesh(experiment.mesh):
    scores = experiment.validate(list(train_phases(experiment, workdir).values())[-1])
  print("  ".join(f"{name} {value:.3f}" for name, value in scores.items()))
  return scores


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
