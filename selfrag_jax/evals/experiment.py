"""A search experiment: a checked config, and the parts that its phases and evaluations share."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from selfrag_jax.evals.plan import print_plan
from selfrag_jax.evals.sections import TRAINED, PassagesData, TwoHopData
from selfrag_jax.generate.retrieve import RetrieverKind
from selfrag_jax.generate.rollout import HostRetrieve, RolloutConfig
from selfrag_jax.mesh import check_batch, check_shards, make_mesh
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.pretrained import Pretrained, load_pretrained
from selfrag_jax.tasks.datasets import QAFolder, read_qa_folder
from selfrag_jax.tasks.passages import PassageSearch
from selfrag_jax.tasks.search import SearchTask
from selfrag_jax.tasks.two_hop_search import TwoHopSearch
from selfrag_jax.text.chat import CHATML, visualize_tokenization
from selfrag_jax.train.episodes import MemoryConfig, Player, Scores, evaluate
from selfrag_jax.train.phases.refrag import Refrag
from selfrag_jax.train.phases.sft import SFT
from selfrag_jax.train.settings import (
  EvalConfig,
  LoopConfig,
  OptionalSFTConfig,
  RLConfig,
  SFTConfig,
  read_config,
  settings,
)
from selfrag_jax.train.state import param_shardings
from selfrag_jax.typing import Params

SECTIONS = {
  "rollout": RolloutConfig,
  "sft": SFTConfig,
  "sft_gold": OptionalSFTConfig,
  "rl": RLConfig,
  "evaluation": EvalConfig,
  "loop": LoopConfig,
}
CHECKED = {**TRAINED, "data": {"two_hop": TwoHopData, "passages": PassagesData}, "memory": MemoryConfig, **SECTIONS}


@dataclasses.dataclass
class Experiment:
  """Everything that a config describes. `base_params` are the pretrained ones; None for a model from scratch."""

  config: dict[str, Any]
  mesh: Mesh
  base_params: Params | None
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
  def document_budget(self) -> int:
    """How many documents a policy may see."""
    return self.rollout.max_hops * self.rollout.documents_per_hop

  @property
  def metadata(self) -> dict[str, Any]:
    """What a checkpoint says about itself."""
    return {
      "config": self.config,
      "model": self.model.to_dict(),
      "tokenizer": {"name": self.task.tokenizer.name, "fingerprint": self.task.tokenizer.fingerprint},
    }

  def evaluate(
    self, params: Params, split: str, n: int, kind: RetrieverKind | HostRetrieve = "memory", **overrides: Any
  ) -> Scores:
    """Score a policy greedily; `overrides` change the rollout's bounds."""
    rollout = dataclasses.replace(self.rollout, **overrides)
    return evaluate(self.player, params, split, n, self.evaluation.batch_size, rollout, kind)

  def sft_phase(self, name: str, config: SFTConfig) -> SFT:
    """Make a supervised phase; it starts from the pretrained parameters, or from scratch."""
    return SFT(
      name,
      self.task,
      self.model,
      config,
      max_hops=self.rollout.max_hops,
      mesh=self.mesh,
      seed=self.seed,
      params=self.base_params,
      evaluate_policy=lambda params: self.evaluate(params, "valid", self.evaluation.periodic).means(),
    )

  def rl_phase(self, params: Params, name: str = "rl", rl: RLConfig | None = None, **overrides: Any) -> Refrag:
    """Make the reinforcement phase that starts from `params`; `overrides` change the rollout's bounds."""
    rollout = dataclasses.replace(self.rollout, **overrides)
    return Refrag(
      name,
      self.player,
      self.model,
      rl or self.rl,
      rollout,
      self.evaluation,
      mesh=self.mesh,
      seed=self.seed,
      params=params,
    )


def build(config: Mapping[str, Any]) -> Experiment:
  """Check a config (nested dicts) and build what it describes. Raises ValueError with the fix where it does not fit."""
  config = read_config(config, CHECKED)
  mesh = make_mesh(config["mesh"])
  sections: dict[str, Any] = {name: settings(cls, config[name], name) for name, cls in SECTIONS.items()}
  check_batch(mesh, sections["evaluation"].batch_size, "evaluation.batch_size")
  folder = read_folder(config["data"], config["init"])  # before weights are downloaded
  pretrained = load_pretrained(config["init"]) if config["init"] else None
  task = make_task(config["data"], folder, pretrained, sections["rollout"].max_query_tokens)
  model = make_model(config["model"], pretrained, task, mesh)
  base = jax.device_put(dict(pretrained.params), param_shardings(model, mesh)) if pretrained else None
  player = Player(task, model, settings(MemoryConfig, config["memory"], "memory"), mesh, encoder_params=base)
  experiment = Experiment(config, mesh, base, task, model, player, **sections)
  with jax.set_mesh(mesh):  # the phases check their batches: the last one now, not after hours of the first
    sft = experiment.sft_phase("sft", experiment.sft)
    check_shards(sft.abstract_state())
    sft.batch(0)
    if experiment.sft_gold.steps:
      experiment.sft_phase("sft_gold", experiment.sft_gold).batch(0)
    experiment.rl_phase(sft.abstract_state().params)
  return experiment


def read_folder(section: Mapping[str, Any], init: str) -> QAFolder | None:
  """Read the questions and passages that `config.data` names; None for a task that makes its own."""
  if section["name"] == "two_hop":
    return None
  if not section["path"]:
    raise ValueError("config.data.path is empty; give the folder of passages and questions: --config.data.path=FOLDER")
  if not init:
    raise ValueError("passages need the tokenizer of a pretrained model: set config.init, e.g. smollm2-135m")
  return read_qa_folder(section["path"])


def make_task(
  section: Mapping[str, Any], folder: QAFolder | None, pretrained: Pretrained | None, max_query_tokens: int
) -> SearchTask:
  """Build the task over `folder`, or the embedded one, from the other keys of `config.data`."""
  options = {key: value for key, value in section.items() if key not in ("name", "path")}
  if folder is None or pretrained is None:
    return TwoHopSearch(**options)
  if pretrained.tokenizer is None:
    raise ValueError("the model of config.init comes without a tokenizer; passages need one")
  template = pretrained.chat_template or CHATML
  return PassageSearch(folder, pretrained.tokenizer, template, max_query_tokens=max_query_tokens, **options)


def make_model(section: Mapping[str, Any], pretrained: Pretrained | None, task: SearchTask, mesh: Mesh) -> ModelConfig:
  """Describe the model: from scratch, or the pretrained one with what `section` changes.

  dtype `auto` computes in bfloat16 where the devices have units for it, in float32 on CPUs.
  """
  fields = {"vocab_size": task.tokenizer.vocab_size} if pretrained is None else pretrained.config.to_dict()
  fields = {**fields, **section}
  if fields.get("dtype") == "auto":
    fields["dtype"] = "float32" if mesh.devices.flat[0].platform == "cpu" else "bfloat16"
  return settings(ModelConfig, fields, "model")


def dry_run(experiment: Experiment) -> None:
  """Print mesh, parameters, the memory that each compiled program needs, and the first batch, decoded."""
  with jax.set_mesh(experiment.mesh):
    sft = experiment.sft_phase("sft", experiment.sft)
    rl = experiment.rl_phase(sft.abstract_state().params)
    print_plan(experiment.mesh, experiment.model, {"sft": sft, "rl": rl})
  batch = sft.batch(0)
  n = int((batch["segment_ids"][0] == 1).sum())
  print("first demonstration of phase sft («…» is trained on):")
  print(visualize_tokenization(experiment.task.tokenizer, batch["tokens"][0, :n], batch["mask"][0, :n], color=False))
