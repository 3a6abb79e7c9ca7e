"""The experiment that trains a cross-encoder on judged queries and compares it with BM25 on unseen titles."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh

from selfrag_jax.aot import print_encoder_plan
from selfrag_jax.checked import Checked, Count
from selfrag_jax.encoders.bert import BertEncoder
from selfrag_jax.encoders.load import load_text_encoder
from selfrag_jax.experiments.base import TRAINED, TakePhase, by_reading, by_training
from selfrag_jax.experiments.retrieval import (
  JudgedTitles,
  Scores,
  bm25_scores,
  names_of_values,
  read_parts,
  score,
  sizes,
  write_report,
)
from selfrag_jax.mesh import make_mesh
from selfrag_jax.retrieval.beir import Judged
from selfrag_jax.retrieval.bm25 import BM25Retriever
from selfrag_jax.retrieval.cross_encoder import CrossEncoder
from selfrag_jax.retrieval.document import Document
from selfrag_jax.retrieval.rerank import Reranker, RerankRetriever
from selfrag_jax.settings import read_config, settings
from selfrag_jax.tasks.ranking import RankingTask
from selfrag_jax.train.loop import LoopConfig
from selfrag_jax.train.phases.rerank import RerankPhase, RerankPhaseConfig
from selfrag_jax.typing import Params

WEIGHTS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)  # of the cross-encoder's score; validation chooses one


@dataclasses.dataclass(frozen=True)
class Periodic(Checked):
  """The number of validation queries that are scored while a model trains."""

  periodic: Count = 50


SECTIONS = {**TRAINED, "data": JudgedTitles, "rerank": RerankPhaseConfig, "loop": LoopConfig, "evaluation": Periodic}


@dataclasses.dataclass
class Experiment:
  """A cross-encoder, the parts of the collection by name (train, valid, test), and the settings of the training."""

  config: dict[str, Any]
  mesh: Mesh
  encoder: CrossEncoder
  data: dict[str, Judged]
  settings: RerankPhaseConfig
  evaluation: Periodic
  loop: LoopConfig

  @cached_property
  def periodic(self) -> Judged:
    """The validation queries that are scored during the training, spread evenly over all."""
    valid, n = self.data["valid"], self.evaluation.periodic
    chosen = list(valid.queries)[:: max(len(valid.queries) // n, 1)][:n]
    return Judged(valid.documents, {q: valid.queries[q] for q in chosen}, {q: valid.qrels[q] for q in chosen})

  def phase(self) -> RerankPhase:
    """Return the training phase."""
    section = self.settings
    task = RankingTask(self.data["train"], section.negatives, mined=section.depth, seed=self.config["seed"])
    return RerankPhase(
      "rerank",
      task,
      self.encoder,
      section,
      mesh=self.mesh,
      seed=self.config["seed"],
      evaluate_params=self.validate,
    )

  def validate(self, params: Params) -> dict[str, float]:
    """Score a cross-encoder on the periodic queries, without BM25's scores."""
    return {name: float(x.mean()) for name, x in self.rerank(self.periodic, self.reader(params), 1.0).items()}

  def reader(self, params: Params) -> Reranker:
    """Return the cross-encoder with these parameters."""
    return CrossEncoder(self.encoder.config, params, self.encoder.tokenizer)

  def rerank(self, data: Judged, reranker: Reranker, weight: float) -> Scores:
    """Rerank BM25's rankings of a part of the collection with `reranker`, and score them."""
    retriever = RerankRetriever(BM25Retriever(), reranker, depth=self.settings.depth, weight=weight)
    retriever.add_documents(data.documents)
    return score(retriever, data)


class Remembered:
  """A reranker that keeps its scores, so that all weights are tried on one reading of the pairs."""

  def __init__(self, reranker: Reranker):
    self._reranker, self._known = reranker, {}

  def __call__(self, query: str, documents: Sequence[Document]) -> np.ndarray:
    """Score documents for a query, f32 [N]."""
    key = query, *(document.id for document in documents)
    if key not in self._known:
      self._known[key] = np.asarray(self._reranker(query, documents))
    return self._known[key]


def build(config: Mapping[str, Any]) -> Experiment:
  """Check a config and load its collection and encoder. Raises ValueError with the fix for a wrong config."""
  config = read_config(config, SECTIONS)
  mesh = make_mesh(config["mesh"])
  section = settings(RerankPhaseConfig, config["rerank"], "rerank")
  data = read_parts(settings(JudgedTitles, config["data"], "data"))
  encoder = load_text_encoder(config["init"])
  if not isinstance(encoder, BertEncoder):
    raise ValueError(f"config.init = {config['init']} is no BERT; a cross-encoder starts from one")
  # texts are cut there: longer rows hold only pads, and the encoder has no positions for them
  section = dataclasses.replace(section, tokens=min(section.tokens, encoder.max_tokens))
  start = CrossEncoder.from_encoder(encoder, jax.random.key(config["seed"]))
  evaluation = settings(Periodic, config["evaluation"], "evaluation")
  return Experiment(config, mesh, start, data, section, evaluation, settings(LoopConfig, config["loop"], "loop"))


def run(experiment: Experiment, workdir: epath.PathLike) -> dict[str, Any]:
  """Train, write the cross-encoder to `workdir/reranker`, and report it beside BM25: `rerank.json`, `.csv`, `.png`."""
  return _report(experiment, workdir, by_training(workdir, experiment.loop, {"config": experiment.config}))


def evaluate(experiment: Experiment, workdir: epath.PathLike) -> dict[str, Any]:
  """Report as `run` does, but from the checkpoint of the last step."""
  return _report(experiment, workdir, by_reading(workdir, {}))


def _report(experiment: Experiment, workdir: epath.PathLike, take: TakePhase) -> dict[str, Any]:
  workdir, data = epath.Path(workdir), experiment.data
  experiment.encoder.check_folder(os.fspath(workdir / "reranker"))  # an error comes now, not after the training
  print(sizes(data), flush=True)
  with jax.set_mesh(experiment.mesh):
    params = jax.device_get(take(experiment.phase()))
  experiment.encoder.save(os.fspath(workdir / "reranker"), params)
  reader = Remembered(experiment.reader(jax.device_put(params)))
  tried = {weight: experiment.rerank(data["valid"], reader, weight)["ndcg@10"].mean() for weight in WEIGHTS}
  weight = max(tried, key=lambda w: tried[w])
  scores = {
    "bm25": bm25_scores(data["test"]),
    "reranked": experiment.rerank(data["test"], reader, 1.0),
    "blended": experiment.rerank(data["test"], reader, weight),
  }
  counts = {f"{part}.queries": len(d.queries) for part, d in data.items()}
  print(f"weight of the cross-encoder that is best on validation: {weight}")
  return write_report(workdir, "rerank", scores, {**counts, "weight": weight, "config": experiment.config})


def value_names(experiment: Experiment) -> set[str]:
  """Return the names of the numbers that the report will have."""
  compared = names_of_values(("bm25", "reranked", "blended"), "bm25")
  return compared | {f"{part}.queries" for part in experiment.data} | {"weight"}


def dry_run(experiment: Experiment) -> None:
  """Print the mesh, the parameters, the memory that the compiled update needs, and the first example."""
  phase = experiment.phase()
  with jax.set_mesh(experiment.mesh):
    print_encoder_plan(experiment.mesh, experiment.encoder.params, {"rerank": phase})
  batch = phase.batch(0)
  for name, row, n in zip(("relevant", "negative"), batch["tokens"][0], batch["lengths"][0], strict=False):
    print(f"{name}:", experiment.encoder.tokenizer.decode(row[:n]))
