"""The RAG experiment: a model is fine-tuned on questions beside retrieved documents, then asked with and without them.

The conditions of the report differ in the documents of the prompt alone: those that were retrieved, none, those of
another question, and, in the embedded task, documents whose facts were changed: a model that reads follows them.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh

from selfrag_jax.aot.table import print_plan
from selfrag_jax.checked import Checked, Count, Natural, Share, suggestion
from selfrag_jax.experiments import base
from selfrag_jax.experiments.chat_model import ChatModel, fit_prompt, load_with_tokenizer
from selfrag_jax.experiments.rag_data import DATA, PlainConfig, Reading, read_data, read_plain
from selfrag_jax.generate.complete import check_new_tokens
from selfrag_jax.mesh import check_shards, make_mesh
from selfrag_jax.model.config import ModelConfig, count_params
from selfrag_jax.reports.answers_by_documents import Scores, as_rows, summarize, table
from selfrag_jax.reports.files import write_file
from selfrag_jax.reports.thresholds import numbers
from selfrag_jax.settings import read_config, settings
from selfrag_jax.storage.arrays import npz_bytes
from selfrag_jax.tasks.countries import Countries
from selfrag_jax.tasks.task import Conversation, Task, mixed
from selfrag_jax.text.chat import COMPACT, ChatTemplate, find_template, render_conversation, visualize_tokenization
from selfrag_jax.text.rag_prompts import repeat_documents
from selfrag_jax.text.tokenizer import Tokenizer
from selfrag_jax.train.load import LoadedModel
from selfrag_jax.train.loop import LoopConfig
from selfrag_jax.train.phases.conversations import ConversationConfig, ConversationPhase, Rendered
from selfrag_jax.train.telemetry import seconds_spent
from selfrag_jax.typing import Params


@dataclasses.dataclass(frozen=True)
class ReadingConfig(ConversationConfig):
  """A phase of a fresh model, on conversations in a simple form.

  `pretrain` is language modelling of all of them, documents included, from which the model learns to copy; `choose` is
  on their answers alone, from which it learns which document to copy from.
  """

  steps: Natural = 0


@dataclasses.dataclass(frozen=True)
class RAGConfig(ConversationConfig):
  """Fine-tuning on answers. `documents`: what the prompts show; `none` and `shuffled` are controls."""

  steps: Natural = 200  # 0: the model is scored as it is
  documents: Literal["retrieved", "none", "shuffled"] = "retrieved"
  unanswerable: Share = 0.1  # of the first questions, of countries also of further ones: no document answers them
  plain: PlainConfig = PlainConfig()


@dataclasses.dataclass(frozen=True)
class EvalConfig(Checked):
  """Greedy evaluation: `periodic` questions while training, `final` for the report.

  `conditions` names those of the report, joined by commas; empty: all. `before`: also of the pretrained model.
  """

  periodic: Count = 128
  final: Count = 512
  batch_size: Count = 64
  max_new_tokens: Count = 8
  conditions: str = ""
  before: bool = True

  def among(self, known: Sequence[str]) -> list[str]:
    """Return the names of the conditions of the report. Raises ValueError for an unknown one."""
    chosen = [name.strip() for name in self.conditions.split(",")] if self.conditions else list(known)
    if unknown := [name for name in chosen if name not in known]:
      raise ValueError(f"config.evaluation.conditions has {unknown[0]!r}; {suggestion(unknown[0], known)}")
    return chosen


PHASES = {"pretrain": ReadingConfig, "choose": ReadingConfig, "rag": RAGConfig}
OWN = {**PHASES, "evaluation": EvalConfig, "loop": LoopConfig}
SECTIONS = {**base.TRAINED, "data": DATA, "model": Mapping, **OWN}
SCRATCH_BUCKET, BUCKET = 32, 128  # prompts are padded to a multiple; those of the embedded task are short


@dataclasses.dataclass
class Experiment:
  """A config and the objects built from it.

  `base_params`: the pretrained parameters; None: from scratch. `context_tokens`: the longest text that they are made
  for; None if unknown.
  """

  config: dict[str, Any]
  mesh: Mesh
  reading: Reading
  tokenizer: Tokenizer
  template: ChatTemplate
  base_params: Params | None
  context_tokens: int | None
  plain: Task | None
  model: ModelConfig
  pretrain: ReadingConfig
  choose: ReadingConfig
  rag: RAGConfig
  evaluation: EvalConfig
  loop: LoopConfig

  @property
  def metadata(self) -> dict[str, Any]:
    """The metadata of a checkpoint."""
    return base.metadata(self.config, self.model, self.tokenizer)

  def phase(self, name: str, params: Params | None) -> ConversationPhase:
    """Make a phase that starts from `params` (None: from the pretrained parameters, or from scratch)."""
    config: Any = getattr(self, name)
    whole, last = name == "pretrain", name == "rag"
    task = self.reading.of_phase(name).training("retrieved" if whole else self.rag.documents, self.rag.unanswerable)
    if last and self.plain is not None:
      task = mixed(task, self.plain, self.rag.plain.share, self.config["seed"])

    def render(index: int) -> Rendered:
      conversation = {"messages": self._messages(task[index])}
      ids, mask = render_conversation(self.tokenizer, conversation, self.template)
      return ids, [1] * len(ids) if whole else mask

    return ConversationPhase(
      name,
      render,
      self.reading.size("train"),
      self.tokenizer.special["<|pad|>"],
      self.model,
      config,
      mesh=self.mesh,
      seed=self.config["seed"],
      params=self.base_params if params is None else params,
      evaluate=self.validate,
    )

  @property
  def policies(self) -> list[str]:
    """The names of the models that are scored, in the order of training."""
    before = self.base_params is not None and self.evaluation.before
    return [*(["base"] if before else []), *self.phases()]

  @property
  def conditions(self) -> list[str]:
    """The names of the conditions of the report."""
    return self.evaluation.among(self.reading.conditions)

  def phases(self) -> list[str]:
    """Return the names of the phases, in the order of training."""
    return [name for name in PHASES if getattr(self, name).steps]

  def check_prompts(self) -> None:
    """Render every prompt of validation and report. Raises ValueError for what would fail there after the training."""
    room = None if self.context_tokens is None else self.context_tokens - self.evaluation.max_new_tokens
    parts = [("valid", self.evaluation.periodic, ["retrieved"]), ("test", self.evaluation.final, self.conditions)]
    for split, n, conditions in parts:
      for condition in conditions:
        rows = list(self.reading.questions(split, n, condition))
        for row in rows:
          fit_prompt(self.tokenizer, self._messages(row), self.template, room)
        if split == "test" and not any(row["answers"] for row in rows):
          raise ValueError(f"none of the {len(rows)} questions of the test has an answer: give more, or others")

  def validate(self, params: Params) -> dict[str, float]:
    """Score held-out questions while the model trains."""
    scores = self.score(params, "valid", self.evaluation.periodic, "retrieved")
    return {"em": float(scores.exact.mean()), "f1": float(scores.soft.mean())}

  def score(self, params: Params, split: str, n: int, condition: str) -> Scores:
    """Score the greedy answers to the first `n` questions of a split."""
    task, section = self.reading.questions(split, n, condition), self.evaluation
    bucket = SCRATCH_BUCKET if self.base_params is None else BUCKET
    loaded = LoadedModel(self.model, params, {}, self.tokenizer, self.context_tokens)
    model = ChatModel(loaded, "the model", self.template, bucket)
    rows = list(task)
    said = model.answer(
      [self._messages(row) for row in rows], max_new_tokens=section.max_new_tokens, batch_size=section.batch_size
    )
    judged = [
      (task.evaluate(row, answer.text), task.reward(row, answer.text), bool(row["answers"]), answer.dropped_documents)
      for row, answer in zip(rows, said, strict=True)
    ]
    return Scores(*map(np.array, zip(*judged, strict=True)))

  def _messages(self, conversation: Conversation) -> list[Mapping[str, Any]]:
    return repeat_documents(conversation["messages"], self.config["data"].get("repeats", 1))


def build(config: Mapping[str, Any]) -> Experiment:
  """Check a config (nested dicts) and build its experiment. Raises ValueError with the fix for a wrong config."""
  config = read_config(config, SECTIONS)
  mesh = make_mesh(**config["mesh"])
  sections: dict[str, Any] = {name: settings(cls, config[name], name) for name, cls in OWN.items()}
  reading = read_data(settings(DATA[config["data"]["name"]], config["data"], "data"))
  if config["init"]:
    loaded = load_with_tokenizer(config["init"], mesh)
    if (tokenizer := loaded.tokenizer) is None or (template := find_template(tokenizer)) is None:
      raise ValueError(f"config.init = {config['init']} is no chat model: it has no tokenizer with a chat template")
    fields = {}
  else:
    if not isinstance(reading, Countries):
      raise ValueError("the questions of files need a pretrained model: set config.init, e.g. smollm2-135m")
    loaded, tokenizer, template = None, reading.tokenizer, COMPACT
    fields = {"vocab_size": tokenizer.vocab_size}
  model = base.make_model({**fields, **config["model"]}, mesh, loaded.config if loaded else None)
  params, context_tokens = (loaded.params, loaded.context_tokens) if loaded else (None, None)
  plain = read_plain(sections["rag"].plain, not isinstance(reading, Countries))
  experiment = Experiment(config, mesh, reading, tokenizer, template, params, context_tokens, plain, model, **sections)
  if not experiment.policies:
    raise ValueError("no model would be scored: set rag.steps, or init and evaluation.before")
  first = experiment.policies[0]
  if params is None and (rank := sections[first].lora.rank):
    raise ValueError(f"{first}.lora.rank = {rank} needs a model to adapt: set config.init, or train {first} in full")
  experiment.evaluation.among(reading.conditions)  # raises now, not after the training
  check_new_tokens(experiment.evaluation.max_new_tokens, context_tokens)
  if not isinstance(reading, Countries):  # those are all alike, and take long to make
    experiment.check_prompts()
  with jax.set_mesh(mesh):  # phases check their batches: an error in the last comes now, not after hours of the first
    for name in experiment.phases():
      phase = experiment.phase(name, None)
      phase.batch(0)
      check_shards(phase.abstract_state())
  return experiment


def planned(experiment: Experiment) -> dict[str, ConversationPhase]:
  """Make the phases to compile them; none has what the one before it trains."""
  return {name: experiment.phase(name, None) for name in experiment.phases()}


def dry_run(experiment: Experiment) -> None:
  """Print mesh, parameters, the memory that each compiled program needs, and the first conversation, decoded."""
  with jax.set_mesh(experiment.mesh):
    phases = planned(experiment)
    print_plan(experiment.mesh, experiment.model, phases)
  if "rag" not in phases:
    return
  batch = phases["rag"].batch(0)
  n = int((batch["segment_ids"][0] == 1).sum())
  print("first conversation of phase rag («…» is trained on):")
  print(visualize_tokenization(experiment.tokenizer, batch["tokens"][0, :n], batch["mask"][0, :n], color=False))


def run(experiment: Experiment, workdir: epath.PathLike) -> dict[str, Any]:
  """Train the phases, each from its newest checkpoint, then evaluate; write `rag.json`, `.csv` and `.npz`.

  `rag.npz` has the scores of each question, for paired comparisons of several runs.
  """
  return _report(experiment, workdir, base.by_training(workdir, experiment.loop, experiment.metadata))


def evaluate(experiment: Experiment, workdir: epath.PathLike) -> dict[str, Any]:
  """Report as `run` does, but from the checkpoints of the last steps."""
  return _report(experiment, workdir, base.by_reading(workdir, experiment.metadata))


def _report(experiment: Experiment, workdir: epath.PathLike, take: base.TakePhase) -> dict[str, Any]:
  workdir = epath.Path(workdir)
  started = time.monotonic() - seconds_spent(workdir)
  base.announce(experiment.model, workdir)
  with jax.set_mesh(experiment.mesh):
    params, origin = None, {}
    trained = {} if experiment.base_params is None else {"base": experiment.base_params}
    for name in experiment.phases():
      params = trained[name] = take(experiment.phase(name, params), **origin)
      origin = {"origin": {"phase": name, "steps": getattr(experiment, name).steps}}
    scores = {name: _score_conditions(experiment, name, trained[name]) for name in experiment.policies}
  report = summarize(scores) | about(experiment) | {"wall_seconds": round(time.monotonic() - started, 1)}
  arrays = {
    f"{policy}.{condition}.{field}": values
    for policy, of in scores.items()
    for condition, found in of.items()
    for field, values in found._asdict().items()
  }
  workdir.mkdir(parents=True, exist_ok=True)  # no phase has made it if none has steps
  write_file(workdir / "rag.npz", npz_bytes(arrays))
  base.write_report(workdir, "rag", report, as_rows(report), experiment.config)
  print(table(report))
  return report


def _score_conditions(experiment: Experiment, policy: str, params: Params) -> dict[str, Scores]:
  scores = {}
  for condition in experiment.conditions:
    scores[condition] = found = experiment.score(params, "test", experiment.evaluation.final, condition)
    print(f"{policy}, {condition}: exact match {found.exact.mean():.3f}", flush=True)
  return scores


def about(experiment: Experiment) -> dict[str, Any]:
  """Return what the report says of the run beside its scores."""
  return {
    "task": experiment.config["data"]["name"],
    "documents": experiment.rag.documents,
    "parameters": count_params(experiment.model)["total"],
    "block_pattern": experiment.model.to_dict()["block_pattern"],
    "seed": experiment.config["seed"],
  }


def value_names(experiment: Experiment) -> set[str]:
  """Return the names of the numbers that the report will have."""
  policies, conditions = experiment.policies, experiment.conditions
  asked = experiment.reading.questions("test", experiment.evaluation.final, conditions[0])
  has_answer = np.array([bool(row["answers"]) for row in asked])
  zeros = np.zeros(len(asked), int)
  nothing = Scores(zeros, zeros, has_answer, zeros)
  found = summarize(dict.fromkeys(policies, dict.fromkeys(conditions, nothing)))
  return set(numbers(found | about(experiment))) | {"wall_seconds"}
