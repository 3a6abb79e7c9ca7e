"""The experiment that trains an encoder of queries to find what is still missing, given the question and a passage.

The vectors of the passages stay as they are: a trained encoder of queries works with every index of the first one.
"""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

from selfrag_jax.checked import Checked, Range, Seed
from selfrag_jax.encoders.cached import CorpusEncoder
from selfrag_jax.experiments import ranking
from selfrag_jax.experiments.base import TRAINED
from selfrag_jax.experiments.retrieval import Scores, given_path, score
from selfrag_jax.metrics.statistics import bootstrap_difference
from selfrag_jax.retrieval.beir import Judged, deal, read_beir
from selfrag_jax.retrieval.dense import DenseRetriever
from selfrag_jax.retrieval.multi_hop import MultiHopRetriever
from selfrag_jax.tasks.ranking import RankingTask
from selfrag_jax.tasks.second_query import with_read_passages
from selfrag_jax.train.loop import LoopConfig
from selfrag_jax.train.phases.encoder import EncoderPhase, EncoderPhaseConfig
from selfrag_jax.typing import Params

METRIC = "all_gold@10"


@dataclasses.dataclass(frozen=True)
class TwoCollections(Checked):
  """Judged collections in the layout of BEIR: one to train on, another one for the report."""

  path: str = ""
  test_path: str = ""
  valid: Annotated[float, Range(above=0, below=1)] = 0.2  # share of the questions of the first collection
  seed: Seed = 0


SECTIONS = {**TRAINED, "data": TwoCollections, "second_query": EncoderPhaseConfig, "loop": LoopConfig}


class Experiment(ranking.RankingExperiment):
  """An encoder of queries, reported by two searches, beside one search and two by a rule or without the training."""

  name, folder, compared = "second_query", "encoder", ("one_search", "names", "untrained", "trained")

  def __init__(self, config: Mapping[str, Any]):
    super().__init__(config, SECTIONS)
    section = self.settings
    if section.trained != "queries":
      raise ValueError(f"config.second_query.trained is {section.trained!r}; the vectors of passages stay: queries")
    self.settings = dataclasses.replace(section, query_tokens=min(section.query_tokens, self.encoder.max_tokens))
    self.encoder.fit([document.text for document in self.data["train"].documents])
    corpus = {document.text for data in self.data.values() for document in data.documents}
    self.passages = CorpusEncoder(self.encoder, corpus)

  def read_data(self, section: TwoCollections) -> dict[str, Judged]:
    whole = read_beir(given_path(section.path))
    parts = deal(sorted(whole.queries), {"train": 1 - section.valid, "valid": section.valid}, section.seed)
    test = read_beir(given_path(section.test_path, "test_path"))
    return {**{name: whole.only(ids) for name, ids in parts.items()}, "test": test}

  def phase(self) -> EncoderPhase:
    task = RankingTask(with_read_passages(self.data["train"]), self.settings.hard_negatives, seed=self.config["seed"])
    start = self.start(lambda params: self.search(self.data["valid"], params, "add_passage", 2).means)
    return EncoderPhase(self.name, task, self.encoder, self.settings, **start)

  def compare(self, params: Params) -> tuple[dict[str, Scores], dict[str, float]]:
    test, before = self.data["test"], self.encoder.params
    scores = {
      "one_search": self.search(test, before, "add_names", 1),
      "names": self.search(test, before, "add_names", 2),
      "untrained": self.search(test, before, "add_passage", 2),
      "trained": self.search(test, params, "add_passage", 2),
    }
    return scores, differences(scores)

  def search(self, data: Judged, params: Params, rule: str, hops: int) -> Scores:
    """Ask the questions of a part with queries that these parameters embed, and score the rankings."""
    retriever = DenseRetriever(encoder=self.passages)
    retriever.query_encoder = self.encoder.with_params(params)
    retriever.add_documents(data.documents)
    return score(MultiHopRetriever(retriever, rule, hops=hops), data)


def differences(scores: Mapping[str, Scores]) -> dict[str, Any]:
  """Return the paired difference of the share of questions with all passages among ten to the first, with interval."""
  first, *others = scores
  found: dict[str, Any] = {}
  for name in others:
    rows = scores[name][METRIC], scores[first][METRIC]
    found[f"{name}.{METRIC}_difference"] = float((rows[0] - rows[1]).mean())
    found[f"{name}.{METRIC}_difference_interval"] = list(bootstrap_difference(*rows))
  return found


build, planned, run, evaluate = Experiment, ranking.planned, ranking.run, ranking.evaluate


def value_names(experiment: Experiment) -> set[str]:
  """Return the names of the numbers that the report will have."""
  names = {f"{name}.{METRIC}_difference" for name in experiment.compared[1:]}
  return ranking.value_names(experiment) | names


def dry_run(experiment: Experiment) -> None:
  """Print the mesh, the parameters, the memory that the compiled update needs, and the first example."""
  phase = experiment.phase()
  ranking.print_plan(experiment, phase)
  found = phase.task.examples([0])
  print("first query:", phase.task.queries[found.queries[0]])
  print("relevant:", phase.task.documents[found.documents[0][0]])
