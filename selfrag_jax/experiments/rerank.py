"""The experiment that trains a cross-encoder on judged queries and compares it with BM25 on unseen titles."""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import numpy as np

from selfrag_jax.checked import Checked, Count
from selfrag_jax.encoders.bert import BertEncoder
from selfrag_jax.experiments import ranking
from selfrag_jax.experiments.base import TRAINED
from selfrag_jax.experiments.retrieval import JudgedTitles, Scores, bm25_scores, score
from selfrag_jax.retrieval.beir import Judged
from selfrag_jax.retrieval.bm25 import BM25Retriever
from selfrag_jax.retrieval.cross_encoder import CrossEncoder
from selfrag_jax.retrieval.document import Document
from selfrag_jax.retrieval.rerank import Reranker, RerankRetriever
from selfrag_jax.settings import settings
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


class Experiment(ranking.RankingExperiment):
  """A cross-encoder, reported alone and blended with BM25, beside BM25."""

  name, folder, compared = "rerank", "reranker", ("bm25", "reranked", "blended")

  def __init__(self, config: Mapping[str, Any]):
    super().__init__(config, SECTIONS)
    if not isinstance(self.encoder, BertEncoder):
      raise ValueError(f"config.init = {config['init']} is no BERT; a cross-encoder starts from one")
    # texts are cut there: longer rows hold only pads, and the encoder has no positions for them
    self.settings = dataclasses.replace(self.settings, tokens=min(self.settings.tokens, self.encoder.max_tokens))
    self.encoder = CrossEncoder.from_encoder(self.encoder, jax.random.key(config["seed"]))
    self.evaluation = settings(Periodic, config["evaluation"], "evaluation")

  @cached_property
  def periodic(self) -> Judged:
    """The validation queries that are scored during the training, spread evenly over all."""
    valid, n = self.data["valid"], self.evaluation.periodic
    return valid.only(list(valid.queries)[:: max(len(valid.queries) // n, 1)][:n])

  def phase(self) -> RerankPhase:
    section = self.settings
    task = RankingTask(self.data["train"], section.negatives, mined=section.depth, seed=self.config["seed"])
    return RerankPhase(self.name, task, self.encoder, section, **self.start(self.validate))

  def validate(self, params: Params) -> dict[str, float]:
    """Score a cross-encoder on the periodic queries, without BM25's scores."""
    return self.rerank(self.periodic, self.reader(params), 1.0).means

  def compare(self, params: Params) -> tuple[dict[str, Scores], dict[str, float]]:
    reader, valid, test = Remembered(self.reader(jax.device_put(params))), self.data["valid"], self.data["test"]
    tried = {weight: self.rerank(valid, reader, weight)["ndcg@10"].mean() for weight in WEIGHTS}
    weight = max(tried, key=lambda w: tried[w])
    scores = {
      "bm25": bm25_scores(test),
      "reranked": self.rerank(test, reader, 1.0),
      "blended": self.rerank(test, reader, weight),
    }
    print(f"weight of the cross-encoder that is best on validation: {weight}")
    return scores, {"weight": weight}

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


build, planned, run, evaluate = Experiment, ranking.planned, ranking.run, ranking.evaluate


def value_names(experiment: Experiment) -> set[str]:
  """Return the names of the numbers that the report will have."""
  return ranking.value_names(experiment) | {"weight"}


def dry_run(experiment: Experiment) -> None:
  """Print the mesh, the parameters, the memory that the compiled update needs, and the first example."""
  phase = experiment.phase()
  ranking.print_plan(experiment, phase)
  batch = phase.batch(0)
  for name, row, n in zip(("relevant", "negative"), batch["tokens"][0], batch["lengths"][0], strict=False):
    print(f"{name}:", experiment.encoder.tokenizer.decode(row[:n]))
