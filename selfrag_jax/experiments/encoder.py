"""The experiment that trains a text encoder on judged queries and scores it on titles that it has never seen."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from selfrag_jax.aot.programs import Traceable
from selfrag_jax.encoders.base import TextEncoder
from selfrag_jax.encoders.batches import trace_spread
from selfrag_jax.experiments import ranking
from selfrag_jax.experiments.base import TRAINED
from selfrag_jax.experiments.retrieval import JudgedTitles, Scores, bm25_scores, read_parts, score
from selfrag_jax.mesh import make_mesh
from selfrag_jax.model.config import StepWork
from selfrag_jax.retrieval.beir import Judged, read_corpus
from selfrag_jax.retrieval.dense import DenseRetriever
from selfrag_jax.settings import settings
from selfrag_jax.storage.hub import locate_data
from selfrag_jax.tasks.inverse_cloze import inverse_cloze
from selfrag_jax.tasks.ranking import RankingTask
from selfrag_jax.train.loop import LoopConfig
from selfrag_jax.train.phases.encoder import EncoderPhase, EncoderPhaseConfig
from selfrag_jax.typing import Params


@dataclasses.dataclass(frozen=True)
class EncoderData(JudgedTitles):
  """A judged collection whose titles are split into parts, and collections of which only the passages are read."""

  unlabelled: str = ""  # folders with a corpus.jsonl, with commas between: their sentences ask for their passages


SECTIONS = {**TRAINED, "data": EncoderData, "encoder": EncoderPhaseConfig, "loop": LoopConfig}


class Experiment(ranking.RankingExperiment):
  """An encoder, reported before and after its training, beside BM25."""

  name, folder, compared = "encoder", "encoder", ("before", "trained", "bm25")

  def __init__(self, config: Mapping[str, Any]):
    super().__init__(config, SECTIONS)
    section, most = self.settings, self.encoder.max_tokens
    # texts are cut there: longer rows hold only pads, and a BERT has no positions for them
    self.settings = dataclasses.replace(
      section, query_tokens=min(section.query_tokens, most), document_tokens=min(section.document_tokens, most)
    )
    self.train = with_unlabelled(self.data["train"], self.config["data"]["unlabelled"], self.config["seed"])
    # a language model's states are standardised before the training
    self.encoder.fit([document.text for document in self.train.documents])
    # questions that were asked, since a sentence of a passage is written like a passage
    self.encoder.fit_queries(self.encoder.tokens(list(self.data["train"].queries.values())))

  def read_data(self, section: Mapping[str, Any]) -> dict[str, Judged]:
    return read_parts(settings(EncoderData, section, "data"))

  def phase(self) -> EncoderPhase:
    task = RankingTask(self.train, self.settings.hard_negatives, seed=self.config["seed"])
    start = self.start(lambda params: self.score("valid", params).means)
    return EncoderPhase(self.name, task, self.encoder, self.settings, **start)

  def finished(self, params: Params) -> Params:
    """Average the parameters with those of the start: a language model forgets less than the ranking loses."""
    kept = self.settings.kept
    average = lambda start, trained: (kept * start + (1 - kept) * trained).astype(trained.dtype)
    return jax.tree.map(average, self.encoder.params, params) if kept else params

  def compare(self, params: Params) -> tuple[dict[str, Scores], dict[str, float]]:
    before, trained = self.score("test", self.encoder.params), self.score("test", params)
    return {"before": before, "trained": trained, "bm25": bm25_scores(self.data["test"])}, {}

  def score(self, part: str, params: Params) -> Scores:
    """Rank a part of the collection with these parameters and score the rankings."""
    retriever = DenseRetriever(encoder=self.encoder.with_params(params))
    retriever.add_documents(self.data[part].documents)
    return score(retriever, self.data[part])


def with_unlabelled(judged: Judged, paths: str, seed: int) -> Judged:
  """Add passages of other collections, and sentences that ask for them. Raises ValueError if no sentence can."""
  for number, path in enumerate(filter(None, paths.split(","))):
    made = inverse_cloze(read_corpus(locate_data(path, ["corpus.jsonl"]) / "corpus.jsonl"), seed)
    if not made.queries:
      raise ValueError(f"config.data.unlabelled: no passage of {path} has two sentences, one of 6 to 30 words")
    own = lambda id, number=number: f"unlabelled {number} {id}"  # collections may use the same ids
    judged = Judged(
      judged.documents + [dataclasses.replace(document, id=own(document.id)) for document in made.documents],
      judged.queries | {own(id): query for id, query in made.queries.items()},
      judged.qrels
      | {own(id): {own(other): grade for other, grade in found.items()} for id, found in made.qrels.items()},
    )
  return judged


@dataclasses.dataclass
class Embedding:
  """The program that embeds the longest documents of a knowledge base, on every host alone."""

  encoder: TextEncoder

  @property
  def mesh(self) -> Mesh:
    return make_mesh()

  def trace(self) -> dict[str, jax.stages.Traced]:
    """Trace the program for devices that need not exist."""
    return {"embedding": trace_spread(self.encoder.apply, self.encoder.params, self.encoder.max_tokens, self.mesh)}

  def model_work(self) -> StepWork | None:
    """Return None: nothing is trained."""
    return None


def planned(experiment: Experiment) -> dict[str, Traceable]:
  """Make what is compiled: the phase, and the embedding of a knowledge base."""
  return {**ranking.planned(experiment), "knowledge base": Embedding(experiment.encoder)}


build, run = Experiment, ranking.run
evaluate, value_names = ranking.evaluate, ranking.value_names


def dry_run(experiment: Experiment) -> None:
  """Print the mesh, the parameters, the memory that the compiled update needs, and the first example."""
  phase = experiment.phase()
  ranking.print_plan(experiment, phase)
  found = phase.task.examples([0])
  print("first query:", phase.task.queries[found.queries[0]])
  for name, place in zip(("relevant", "negative"), found.documents[0], strict=False):
    print(f"{name}:", phase.task.documents[place])
