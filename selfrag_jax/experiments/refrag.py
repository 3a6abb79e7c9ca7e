"""The REFRAG experiment: supervision teaches the format, the reward the strategy; the report compares conditions."""

import dataclasses
import time
from collections.abc import Container, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh

from selfrag_jax.aot.table import print_plan
from selfrag_jax.checked import Checked, Count
from selfrag_jax.encoders.language_model import fitted_constants
from selfrag_jax.experiments import base
from selfrag_jax.experiments.rollout_examples import write_examples
from selfrag_jax.experiments.search_data import DATA, make_task, read_folder
from selfrag_jax.generate.host_rollout import HostRetrieve
from selfrag_jax.generate.retrieve import RetrieverKind
from selfrag_jax.generate.rollout import RolloutConfig
from selfrag_jax.mesh import check_batch, check_shards, make_mesh, place
from selfrag_jax.metrics.statistics import wilson_interval
from selfrag_jax.model.config import ModelConfig, count_params
from selfrag_jax.model.pretrained import load_pretrained
from selfrag_jax.reports import figures
from selfrag_jax.reports.files import write_file
from selfrag_jax.retrieval.base import BaseRetriever
from selfrag_jax.retrieval.bm25 import BM25Retriever
from selfrag_jax.retrieval.document import Document
from selfrag_jax.settings import read_config, settings
from selfrag_jax.storage.arrays import npz_bytes
from selfrag_jax.tasks.passages import PassageSearch
from selfrag_jax.tasks.search_task import SearchTask
from selfrag_jax.text.chat import visualize_tokenization
from selfrag_jax.train.load import load_model
from selfrag_jax.train.loop import LoopConfig
from selfrag_jax.train.phases.base import GradientPhase
from selfrag_jax.train.phases.refrag import Refrag, RLConfig
from selfrag_jax.train.phases.sft import SFT, OptionalSFTConfig, SFTConfig
from selfrag_jax.train.rollouts import MemoryConfig, RolloutRunner, Scores
from selfrag_jax.train.rollouts import evaluate as score_policy
from selfrag_jax.train.state import param_shardings
from selfrag_jax.train.telemetry import seconds_spent
from selfrag_jax.typing import Params


@dataclasses.dataclass(frozen=True)
class EvalConfig(Checked):
  """Greedy evaluation on held-out questions: `periodic` questions while training, `final` questions for the report."""

  periodic: Count = 256
  final: Count = 1024
  batch_size: Count = 128


OWN = {  # the sections that are fields of an experiment
  "rollout": RolloutConfig,
  "sft": SFTConfig,
  "sft_gold": OptionalSFTConfig,
  "rl": RLConfig,
  "evaluation": EvalConfig,
  "loop": LoopConfig,
}
SECTIONS = {**base.TRAINED, "data": DATA, "model": Mapping, "memory": MemoryConfig, **OWN}


@dataclasses.dataclass
class Experiment:
  """A config and the objects built from it. `base_params`: the pretrained parameters; None: from scratch."""

  config: dict[str, Any]
  mesh: Mesh
  base_params: Params | None
  task: SearchTask
  model: ModelConfig
  runner: RolloutRunner
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
    """The number of documents that a policy may see."""
    return self.rollout.max_hops * self.rollout.documents_per_hop

  @property
  def metadata(self) -> dict[str, Any]:
    """The metadata of a checkpoint."""
    return base.metadata(self.config, self.model, self.task.tokenizer)

  def evaluate(
    self, params: Params, split: str, n: int, kind: RetrieverKind | HostRetrieve = "memory", **overrides: Any
  ) -> Scores:
    """Score a policy greedily; `overrides` change the rollout's bounds."""
    rollout = dataclasses.replace(self.rollout, **overrides)
    return score_policy(self.runner, params, split, n, self.evaluation.batch_size, rollout, kind)

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
      evaluate=lambda params: self.evaluate(params, "valid", self.evaluation.periodic).means(),
    )

  def rl_phase(self, params: Params, name: str = "rl", rl: RLConfig | None = None, **overrides: Any) -> Refrag:
    """Make the reinforcement phase that starts from `params`; `overrides` change the rollout's bounds."""
    rollout = dataclasses.replace(self.rollout, **overrides)
    return Refrag(
      name,
      self.runner,
      self.model,
      rl or self.rl,
      rollout,
      mesh=self.mesh,
      seed=self.seed,
      params=params,
      evaluate=lambda params: self.evaluate(params, "valid", self.evaluation.periodic, **overrides).means(),
    )


def build(config: Mapping[str, Any]) -> Experiment:
  """Check a config (nested dicts) and build its experiment. Raises ValueError with the fix for a wrong config."""
  config = read_config(config, SECTIONS)
  mesh = make_mesh(**config["mesh"])
  sections: dict[str, Any] = {name: settings(cls, config[name], name) for name, cls in OWN.items()}
  data: Any = settings(DATA[config["data"]["name"]], config["data"], "data")
  check_batch(mesh, sections["evaluation"].batch_size, "evaluation.batch_size")
  folder = read_folder(data, config["init"])  # an error here comes before weights are downloaded
  pretrained = load_pretrained(config["init"]) if config["init"] else None
  task = make_task(data, folder, pretrained, sections["rollout"])
  fields = {"vocab_size": task.tokenizer.vocab_size} if pretrained is None else {}
  model = base.make_model({**fields, **config["model"]}, mesh, pretrained.config if pretrained else None)
  params = place(dict(pretrained.params), param_shardings(model, mesh)) if pretrained else None
  memory, constants = settings(MemoryConfig, config["memory"], "memory"), None
  if pretrained is not None and memory.encoder == "lm":
    constants = fitted_constants(config["init"], model)
  runner = RolloutRunner(task, model, memory, mesh, encoder_params=params, constants=constants)
  experiment = Experiment(config, mesh, params, task, model, runner, **sections)
  with jax.set_mesh(mesh):  # phases check their batches: an error in the last comes now, not after hours of the first
    sft = experiment.sft_phase("sft", experiment.sft)
    check_shards(sft.abstract_state())
    sft.batch(0)
    if experiment.sft_gold.steps:
      experiment.sft_phase("sft_gold", experiment.sft_gold).batch(0)
    experiment.rl_phase(sft.abstract_state().params)
  return experiment


def planned(experiment: Experiment) -> dict[str, GradientPhase]:
  """Make the phases to compile them; none has what the one before it trains."""
  sft = experiment.sft_phase("sft", experiment.sft)
  return {"sft": sft, "rl": experiment.rl_phase(sft.abstract_state().params)}


def dry_run(experiment: Experiment) -> None:
  """Print mesh, parameters, the memory that each compiled program needs, and the first batch, decoded."""
  with jax.set_mesh(experiment.mesh):
    phases = planned(experiment)
    print_plan(experiment.mesh, experiment.model, phases)
  batch: Any = phases["sft"].batch(0)
  n = int((batch["segment_ids"][0] == 1).sum())
  print("first demonstration of phase sft («…» is trained on):")
  print(visualize_tokenization(experiment.task.tokenizer, batch["tokens"][0, :n], batch["mask"][0, :n], color=False))


SCORES = ("em", "f1", "all_gold", "valid")  # reported for each condition
TIES = 32  # documents asked for beyond the budget: of equal scores, the first document in the corpus is taken
QUESTIONS = ("memory", "bm25")  # asked once for each question as it is written
COUNTS = ("dropped_questions", "unanswered_questions", "cut_passages")  # of questions and passages of a folder


class Condition(NamedTuple):
  """One line of the report: a policy, a description, its retriever and its most hops (None: as in training)."""

  policy: str
  text: str
  kind: str = "memory"
  max_hops: int | None = None


CONDITIONS = {
  "base": Condition("base", "the pretrained model, before any training"),
  "closed_book": Condition("rl", "the final policy, no search allowed", max_hops=0),
  "one_search": Condition("rl", "the final policy, one search allowed", max_hops=1),
  "sft": Condition("sft", "before reinforcement"),
  "sft_gold": Condition("sft_gold", "trained on gold demonstrations instead"),
  "refrag": Condition("rl", "the final policy: after reinforcement"),
  "bm25": Condition("rl", "the final policy, its queries answered by BM25", kind="bm25"),
  "oracle": Condition("rl", "the final policy, given the gold documents", kind="oracle"),
}


def run(experiment: Experiment, workdir: epath.PathLike) -> dict[str, Any]:
  """Train all phases, each from its newest checkpoint, then evaluate; write `report.json` and files beside it.

  These are `report.csv`, `.png`, `.html`, and `.npz` with the scores of each question, for paired comparisons of
  several runs; and `config.json`: until then the checkpoints hold the config.
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
    policies = _policies(experiment, take)
    scores = evaluate_all(experiment, policies)
    questions = single_searches(experiment)
    report = summarize(experiment, scores, questions)
    shown = {"before reinforcement": policies["sft"], "after": policies["rl"]}
    bounds, rl, batch = experiment.rollout, experiment.rl, experiment.evaluation.batch_size
    write_examples(workdir / "report.html", experiment.runner, shown, bounds, rl, batch)
  report["wall_seconds"] = round(time.monotonic() - started, 1)
  arrays = {f"{name}.{field}": values for name, of in scores.items() for field, values in of._asdict().items()}
  arrays |= {f"{name}_question.all_gold": values for name, values in questions.items()}
  write_file(workdir / "report.npz", npz_bytes(arrays))
  figures.em_over_steps(workdir, report)
  base.write_report(workdir, "report", report, as_rows(report), experiment.config)
  print(table(report))
  return report


def _policies(experiment: Experiment, take: base.TakePhase) -> dict[str, Params]:
  """Return the final parameters of each phase, in the order of training."""
  policies: dict[str, Params] = {} if experiment.base_params is None else {"base": experiment.base_params}
  policies["sft"] = take(experiment.sft_phase("sft", experiment.sft))
  if experiment.sft_gold.steps:
    policies["sft_gold"] = take(experiment.sft_phase("sft_gold", experiment.sft_gold))
  origin = {"phase": "sft", "steps": experiment.sft.steps}
  policies["rl"] = take(experiment.rl_phase(policies["sft"]), origin=origin)
  return policies


def evaluate_all(experiment: Experiment, policies: Mapping[str, Params]) -> dict[str, Scores]:
  """Evaluate every condition that has a policy, all on the same held-out questions."""
  scores, n = {}, experiment.evaluation.final
  for name, condition in _conditions(experiment, policies).items():
    kind: Any = bm25(experiment) if condition.kind == "bm25" else condition.kind
    overrides = {} if condition.max_hops is None else {"max_hops": condition.max_hops}
    scores[name] = experiment.evaluate(policies[condition.policy], "test", n, kind, **overrides)
    print(f"evaluated {name}: exact match {scores[name].exact_match.mean():.3f}", flush=True)
  return scores


def value_names(experiment: Experiment) -> set[str]:
  """Return the names of the numbers that the report will have."""
  policies = {"sft", "rl"} | ({"base"} if experiment.base_params is not None else set())
  if experiment.sft_gold.steps:
    policies.add("sft_gold")
  names = {f"{field}.{name}" for field in SCORES for name in _conditions(experiment, policies)}
  names |= {"recall.hop1", "recall.gold", "searches_per_question", "format_valid", "chance", "n", "parameters", "seed"}
  of_passages = (
    {*(f"{name}_question_all_gold" for name in QUESTIONS), *COUNTS}
    if isinstance(experiment.task, PassageSearch)
    else set()
  )
  return names | of_passages | {"wall_seconds"}


def _conditions(experiment: Experiment, policies: Container[str]) -> dict[str, Condition]:
  """Return the conditions that have a policy; BM25 needs passages."""
  by_words = isinstance(experiment.task, PassageSearch)
  return {name: c for name, c in CONDITIONS.items() if c.policy in policies and (by_words or c.kind != "bm25")}


def bm25(experiment: Experiment) -> HostRetrieve:
  """Return a host retriever over the task's passages: BM25 with its defaults."""
  retriever = BM25Retriever()
  retriever.add_documents(passages(experiment))
  return answered_by(experiment, retriever)


def passages(experiment: Experiment) -> list[Document]:
  """Return the task's passages as documents; their ids are their slots."""
  task: Any = experiment.task
  return [Document(str(slot), **document) for slot, document in enumerate(task.documents)]


def answered_by(experiment: Experiment, retriever: BaseRetriever) -> HostRetrieve:
  """Return a function that lets a retriever of `passages` answer the queries of rollouts."""
  task: Any = experiment.task
  corpus, budget = task.corpus, experiment.document_budget

  def retrieve(queries, hop: int):
    texts = [task.tokenizer.decode(query, skip_special=True) for query in queries]
    found = [[int(document.id) for document in row] for row in retriever.retrieve_batch(texts, budget + TIES)]
    return [[(slot, corpus.tokens[slot, : corpus.lengths[slot]].tolist()) for slot in row[:budget]] for row in found]

  return retrieve


def summarize(
  experiment: Experiment, scores: Mapping[str, Scores], questions: Mapping[str, np.ndarray]
) -> dict[str, Any]:
  """Turn the scores of the conditions, and the finds of `single_searches`, into the report."""
  final = scores["refrag"]
  means = lambda field: {name: float(getattr(score, field).mean()) for name, score in scores.items()}
  interval = lambda score: list(wilson_interval(int(score.exact_match.sum()), len(score.exact_match)))
  report = {
    "em": means("exact_match"),
    "em_interval": {name: interval(score) for name, score in scores.items()},
    "f1": means("f1"),
    "all_gold": means("all_gold"),
    "valid": means("valid"),
    "recall": {"hop1": float(final.first_gold.mean()), "gold": float(final.gold_recall.mean())},
    "searches_per_question": float(final.searches.mean()),
    "format_valid": float(final.valid.mean()),
    "task": experiment.config["data"]["name"],
    "chance": experiment.task.chance,
    "n": len(final.exact_match),
    "parameters": count_params(experiment.model)["total"],
    "block_pattern": experiment.model.to_dict()["block_pattern"],
    "seed": experiment.seed,
  }
  if isinstance(experiment.task, PassageSearch):
    report |= {f"{name}_question_all_gold": float(found.mean()) for name, found in questions.items()}
    for name in COUNTS:
      report[name] = getattr(experiment.task, name)
  return report


def single_searches(experiment: Experiment) -> dict[str, np.ndarray]:
  """Return whether one search for each test question finds all gold passages, float32 [N], by retriever.

  It may find as many documents as a policy sees. Passages alone have questions as texts; else there is nothing.
  """
  if not isinstance(experiment.task, PassageSearch):
    return {}
  task, budget = experiment.task, experiment.document_budget
  indices = np.arange(task.size("test"))
  batch = task.batch("test", indices)
  queries = [task.tokenizer.encode(text) for text in task.texts("test", indices)]
  by_words = [[slot for slot, _ in row] for row in bm25(experiment)(queries, 0)]
  found = dict(zip(QUESTIONS, (experiment.runner.search(batch, budget).tolist(), by_words), strict=True))
  all_of = lambda slots: [set(g[g >= 0].tolist()) <= set(s) for g, s in zip(batch.gold, slots, strict=True)]
  return {name: np.array(all_of(slots), np.float32) for name, slots in found.items()}


def as_rows(report: Mapping[str, Any]) -> Iterator[list[Any]]:
  """Yield the header and one row per condition."""
  yield ["condition", "em", "low", "high", *SCORES[1:]]
  for name, interval in report["em_interval"].items():
    em, *others = (f"{report[field][name]:.4f}" for field in SCORES)
    yield [name, em, *(f"{bound:.4f}" for bound in interval), *others]


def table(report: Mapping[str, Any]) -> str:
  """Format the report for a terminal."""
  lines = [f"{'':12} {'EM':>6}  {'95 % interval':16} {'F1':>6} {'all gold':>9} {'valid':>6}"]
  for name, em in report["em"].items():
    low, high = report["em_interval"][name]
    rest = f"{report['f1'][name]:6.3f} {report['all_gold'][name]:9.3f} {report['valid'][name]:6.3f}"
    lines.append(f"{name:12} {em:6.3f}  [{low:.3f}, {high:.3f}]   {rest}  {CONDITIONS[name].text}")
  lines.append(f"{'chance':12} {report['chance']:6.3f}")
  lines.append(
    f"first document found {report['recall']['hop1']:.3f}, gold documents {report['recall']['gold']:.3f}, "
    f"searches a question {report['searches_per_question']:.2f}, n = {report['n']}, {report['wall_seconds']:.0f} s"
  )
  if "bm25_question_all_gold" in report:
    memory, by_words = (report[f"{name}_question_all_gold"] for name in QUESTIONS)
    lines.append(f"all gold found by one search for the question: the memory {memory:.3f}, BM25 {by_words:.3f}")
    lines.append(f"{report['dropped_questions']} questions left out as too long, {report['cut_passages']} passages cut")
  return "\n".join(lines)


def load_policy(experiment: Experiment, workdir: epath.PathLike, phase: str) -> Params:
  """Read the newest intact parameters of a phase. Raises ValueError for another tokenizer or model."""
  task, model, mesh = experiment.task, experiment.model, experiment.mesh
  return load_model(workdir, phase, tokenizer=task.tokenizer, model=model, mesh=mesh).params
