"""The Self-RAG memory's three phases, from a config: pretrain, train with memory, train to recall from any position.

A config has the sections of the phases that it trains. `init` names the workdir of an earlier run whose last phase the
first of them starts from.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from etils import epath
from jax.sharding import Mesh

from selfrag_jax.evals.recall import measure
from selfrag_jax.mesh import check_shards, make_mesh
from selfrag_jax.model.config import ModelConfig, count_params
from selfrag_jax.self_rag import SelfRAGConfig, memory_tokens
from selfrag_jax.tasks.sequences import FactData
from selfrag_jax.train.load import load_model
from selfrag_jax.train.loop import train
from selfrag_jax.train.phases.memory import MemoryPhase
from selfrag_jax.train.phases.pretrain import Pretrain
from selfrag_jax.train.reading import Reader
from selfrag_jax.train.settings import LoopConfig, MemoryPhaseConfig, PretrainConfig, RecallConfig, settings
from selfrag_jax.typing import Params

PHASES: dict[str, type] = {
  "pretrain": PretrainConfig,
  "memory": MemoryPhaseConfig,
  "position_recall": MemoryPhaseConfig,
}
SECTIONS: dict[str, type] = {"self_rag": SelfRAGConfig, "loop": LoopConfig, "evaluation": RecallConfig, **PHASES}
VALIDATION = RecallConfig(questions=32, depths=8)  # while training


@dataclasses.dataclass
class Experiment:
  """Everything that a config describes; `phases` are the settings of those that it trains, in their order."""

  config: dict[str, Any]
  mesh: Mesh
  data: FactData
  model: ModelConfig
  reader: Reader
  phases: dict[str, Any]
  evaluation: RecallConfig
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
    demand = "recent" if name == "memory" else "even"
    size = self.phases[name].batch_size
    # contexts that no earlier phase has seen
    first = sum(self.phases[p].steps * self.phases[p].batch_size for p in ("memory",) if p in self.phases and p != name)
    sequences = lambda step: self.data.sequences("train", range(first + step * size, first + (step + 1) * size), demand)
    return MemoryPhase(name, sequences, self.reader, self.phases[name], evaluate_reader=self.validate, **common)

  def validate(self, params: Params) -> dict[str, float]:
    """Score a reader on a few contexts of the length that it trains on."""
    curve = measure(self.reader, params, self.data.task, "memory", VALIDATION)
    scores = {"accuracy": curve.right, "recall_at_1": curve.first, "loss": curve.loss}
    return {name: float(values.mean()) for name, values in scores.items()}


def build(config: Mapping[str, Any]) -> Experiment:
  """Check a config (nested dicts) and build what it describes. Raises ValueError with the fix where it does not fit."""
  config = {name: value for name, value in config.items() if name != "workdir"}
  mesh = make_mesh(config["mesh"])
  section = dict(config["data"])
  if (kind := section.pop("name")) != "facts":
    raise ValueError(f"config.data.name is {kind!r}; facts")
  data = FactData(**section)
  fields = {"vocab_size": data.tokenizer.vocab_size, **config["model"]}
  if fields["dtype"] == "auto":
    fields["dtype"] = "float32" if mesh.devices.flat[0].platform == "cpu" else "bfloat16"
  model = settings(ModelConfig, fields, "model")
  parts: dict[str, Any] = {name: settings(cls, config[name], name) for name, cls in SECTIONS.items() if name in config}
  rag = parts["self_rag"]
  if data.chunk_tokens > rag.chunk_size:
    raise ValueError(f"facts have up to {data.chunk_tokens} tokens, self_rag.chunk_size is {rag.chunk_size}")
  reader = Reader(model, rag, memory_tokens(data.tokenizer), mesh)
  phases = {name: parts[name] for name in PHASES if name in parts}
  experiment = Experiment(config, mesh, data, model, reader, phases, parts["evaluation"], parts["loop"])
  with jax.set_mesh(mesh):  # the phases check their batches: the last one now, not after hours of the first
    params = None
    for name in phases:
      phase = experiment.phase(name, params if params or not config["init"] else {})
      phase.batch(0)
      params = phase.abstract_state().params
      check_shards(params)
  return experiment


def train_phases(experiment: Experiment, workdir: epath.PathLike) -> dict[str, Params]:
  """Train the phases one after the other, each from its newest checkpoint; return the parameters after each."""
  workdir, policies = epath.Path(workdir), {}
  params, origin = None, None
  if experiment.config["init"]:
    loaded = load_model(experiment.config["init"], tokenizer=experiment.data.tokenizer, mesh=experiment.mesh)
    if loaded.config != experiment.model:
      raise ValueError(f"{experiment.config['init']} holds the model {loaded.config}, not {experiment.model}")
    params, origin = loaded.params, {"phase": loaded.metadata["phase"], "workdir": experiment.config["init"]}
    policies[loaded.metadata["phase"]] = params
  for name, config in experiment.phases.items():
    metadata = {**experiment.metadata, **({"origin": origin} if origin else {})}
    params = policies[name] = train(experiment.phase(name, params), workdir, experiment.loop, metadata).params
    origin = {"phase": name, "steps": config.steps}
  return policies


def run(experiment: Experiment, workdir: epath.PathLike) -> dict[str, Any]:
  """Train the phases and print how well the last one reads."""
  print(f"{count_params(experiment.model)['total']:,} parameters, workdir {workdir}", flush=True)
  with jax.set_mesh(experiment.mesh):
    scores = experiment.validate(list(train_phases(experiment, workdir).values())[-1])
  print("  ".join(f"{name} {value:.3f}" for name, value in scores.items()))
  return scores
