"""The experiment that trains a text encoder on judged queries and scores it on titles that it has never seen.

It may also read passages of other collections, for which their own sentences ask.
"""

import dataclasses
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import jax
from jax.sharding import Mesh

from selfrag_jax.aot.programs import Traceable
from selfrag_jax.encoders.base import TextEncoder
from selfrag_jax.encoders.batches import trace_spread
from selfrag_jax.experiments import ranking
from selfrag_jax.experiments.base import TRAINED
from selfrag_jax.experiments.retrieval import JudgedTitles, Scores, bm25_scores, score
from selfrag_jax.mesh import make_mesh
from selfrag_jax.model.config import StepWork
from selfrag_jax.retrieval.beir import Judged, read_corpus
from selfrag_jax.retrieval.dense import DenseRetriever
from selfrag_jax.storage.hub import locate_data
from selfrag_jax.tasks.cloze import CLOZE_WORDS
from selfrag_jax.tasks.inverse_cloze import inverse_cloze
from selfrag_jax.tasks.ranking import RankingTask
from selfrag_jax.train.loop import LoopConfig
from selfrag_jax.train.phases.encoder import EncoderPhase, EncoderPhaseConfig
from selfrag_jax.typing import Params


@dataclasses.dataclass(frozen=True)
class EncoderData(JudgedTitles):
  """A judged collection whose titles are split into parts, and collections of which only the passages are read."""

  unlabelled: str = ""  # folders with a corpus.jsonl, with commas between: their sentences ask for their passages


CORPUS = "corpus.jsonl"
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
    # a language model's states are standardised before the training. Passages and questions of the same collection:
    # what sets one's mean apart from the other's is then how they are written, and not what they are about
    judged = self.data["train"]
    self.encoder.fit([document.text for document in judged.documents])
    self.encoder.fit_queries(self.encoder.tokens(list(judged.queries.values())))

  def read_data(self, section: EncoderData) -> dict[str, Judged]:
    parts = super().read_data(section)
    self.unlabelled = read_unlabelled(section.unlabelled, parts, self.config["seed"])
    return parts

  @property
  def counted(self) -> dict[str, Judged]:
    return {**self.data, **({"unlabelled": self.unlabelled} if self.unlabelled.queries else {})}

  @cached_property
  def train(self) -> Judged:
    """All that is trained on: each judged pair, and each made one, counts once in an epoch."""
    judged, made = self.data["train"], self.unlabelled
    return Judged(judged.documents + made.documents, judged.queries | made.queries, judged.qrels | made.qrels)

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


def read_unlabelled(paths: str, parts: Mapping[str, Judged], seed: int) -> Judged:
  """Read the passages of folders, and make queries of their sentences.

  Passages of a title that is held out, and those that are there already, are left out. Raises FileNotFoundError for a
  folder without passages, ValueError if nothing asks for any.
  """
  folders = [path.strip() for path in paths.split(",") if path.strip()]
  held_out = {document.title for name in ("valid", "test") for document in parts[name].documents} - {""}
  known = {document.content for data in parts.values() for document in data.documents}
  documents = []
  for number, path in enumerate(folders):
    file = locate_data(path, [CORPUS]) / CORPUS
    if not file.exists():
      raise FileNotFoundError(f"config.data.unlabelled: {path} has no {CORPUS}; give folders, with commas between them")
    for document in read_corpus(file):
      if document.title not in held_out and document.content not in known:
        known.add(document.content)
        # collections may use the same ids
        documents.append(dataclasses.replace(document, id=f"unlabelled {number} {document.id}"))
  made = inverse_cloze(documents, seed)
  if folders and not made.queries:
    least, most = CLOZE_WORDS
    raise ValueError(
      f"config.data.unlabelled: of {len(documents)} passages of {paths} that the judged collection does not have, none "
      f"has two sentences of {least} to {most} words; give other folders, or leave it empty"
    )
  return made


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
