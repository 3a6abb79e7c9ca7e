"""The experiment that trains a text encoder on judged queries and scores it on titles that it has never seen."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import jax
from etils import epath
from jax.sharding import Mesh

from selfrag_jax.aot import print_encoder_plan
from selfrag_jax.encoders.base import TextEncoder
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
from selfrag_jax.retrieval.dense import DenseRetriever
from selfrag_jax.settings import read_config, settings
from selfrag_jax.tasks.ranking import RankingTask
from selfrag_jax.train.loop import LoopConfig
from selfrag_jax.train.phases.encoder import EncoderPhase, EncoderPhaseConfig
from selfrag_jax.typing import Params

SECTIONS = {**TRAINED, "data": JudgedTitles, "encoder": EncoderPhaseConfig, "loop": LoopConfig}


@dataclasses.dataclass
class Experiment:
  """An encoder, the parts of the collection by name (train, valid, test), and the settings of the training."""

  config: dict[str, Any]
  mesh: Mesh
  encoder: TextEncoder
  data: dict[str, Judged]
  settings: EncoderPhaseConfig
  loop: LoopConfig

  def phase(self) -> EncoderPhase:
    """Return the training phase."""
    task = RankingTask(self.data["train"], self.settings.hard_negatives, seed=self.config["seed"])
    return EncoderPhase(
      "encoder",
      task,
      self.encoder,
      self.settings,
      mesh=self.mesh,
      seed=self.config["seed"],
      evaluate_params=lambda params: {name: float(x.mean()) for name, x in self.score("valid", params).items()},
    )

  def score(self, part: str, params: Params) -> Scores:
    """Rank a part of the collection with these parameters and score the rankings."""
    embed = self.encoder.with_params(params)
    retriever = DenseRetriever(encoder=embed)
    retriever.add_documents(self.data[part].documents)
    return score(retriever, self.data[part])


def build(config: Mapping[str, Any]) -> Experiment:
  """Check a config and load its collection and encoder. Raises ValueError with the fix for a wrong config."""
  config = read_config(config, SECTIONS)
  mesh = make_mesh(config["mesh"])
  section = settings(EncoderPhaseConfig, config["encoder"], "encoder")
  data = read_parts(settings(JudgedTitles, config["data"], "data"))
  encoder = load_text_encoder(config["init"])
  most = encoder.max_tokens  # texts are cut there: longer rows hold only pads, and a BERT has no positions for them
  section = dataclasses.replace(
    section, query_tokens=min(section.query_tokens, most), document_tokens=min(section.document_tokens, most)
  )
  # a language model's states are standardised before the training
  encoder.fit([document.text for document in data["train"].documents])
  return Experiment(config, mesh, encoder, data, section, settings(LoopConfig, config["loop"], "loop"))


def run(experiment: Experiment, workdir: epath.PathLike) -> dict[str, Any]:
  """Train, write the encoder to `workdir/encoder`, and report before and after: `encoder.json`, `.csv` and `.png`."""
  return _report(experiment, workdir, by_training(workdir, experiment.loop, {"config": experiment.config}))


def evaluate(experiment: Experiment, workdir: epath.PathLike) -> dict[str, Any]:
  """Report as `run` does, but from the checkpoint of the last step."""
  return _report(experiment, workdir, by_reading(workdir, {}))


def _report(experiment: Experiment, workdir: epath.PathLike, take: TakePhase) -> dict[str, Any]:
  workdir, data = epath.Path(workdir), experiment.data
  experiment.encoder.check_folder(os.fspath(workdir / "encoder"))  # an error comes now, not after the training
  print(sizes(data), flush=True)
  with jax.set_mesh(experiment.mesh):
    params = jax.device_get(take(experiment.phase()))
  experiment.encoder.save(os.fspath(workdir / "encoder"), params)
  scores = {
    "before": experiment.score("test", experiment.encoder.params),
    "trained": experiment.score("test", params),
    "bm25": bm25_scores(data["test"]),
  }
  counts = {f"{part}.queries": len(d.queries) for part, d in data.items()}
  return write_report(workdir, "encoder", scores, {**counts, "config": experiment.config})


def value_names(experiment: Experiment) -> set[str]:
  """Return the names of the numbers that the report will have."""
  compared = names_of_values(("before", "trained", "bm25"), "before")
  return compared | {f"{part}.queries" for part in experiment.data}


def dry_run(experiment: Experiment) -> None:
  """Print the mesh, the parameters, the memory that the compiled update needs, and the first example."""
  phase = experiment.phase()
  with jax.set_mesh(experiment.mesh):
    print_encoder_plan(experiment.mesh, experiment.encoder.params, {"encoder": phase})
  found = phase.task.examples([0])
  print("first query:", phase.task.queries[found.queries[0]])
  for name, place in zip(("relevant", "negative"), found.documents[0], strict=False):
    print(f"{name}:", phase.task.documents[place])
