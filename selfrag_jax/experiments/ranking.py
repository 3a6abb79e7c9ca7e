"""The common part of the experiments that train a model to rank the documents of a judged collection."""

import abc
import os
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
from etils import epath

from selfrag_jax.aot.table import print_encoder_plan
from selfrag_jax.encoders.load import load_text_encoder
from selfrag_jax.experiments.base import TakePhase, by_reading, by_training
from selfrag_jax.experiments.retrieval import Scores, names_of_values, read_parts, sizes, write_report
from selfrag_jax.mesh import fetch, make_mesh
from selfrag_jax.retrieval.beir import Judged
from selfrag_jax.settings import read_config, settings
from selfrag_jax.storage.atomic import is_local
from selfrag_jax.train.loop import LoopConfig
from selfrag_jax.train.phases.base import GradientPhase, Start
from selfrag_jax.typing import Params


class RankingExperiment(abc.ABC):
  """A model, the parts of the collection by name (train, valid, test), and the settings of the training.

  The training and the report have the experiment's `name`; the trained model is written to `folder` in the workdir.
  The scores of `compared` are reported, and compared with those of the first.
  """

  name: ClassVar[str]
  folder: ClassVar[str]
  compared: ClassVar[tuple[str, ...]]

  def __init__(self, config: Mapping[str, Any], sections: Mapping[str, Any]):
    """Check a config and load its collection and encoder. Raises ValueError with the fix for a wrong config."""
    self.config = config = read_config(config, sections)
    self.mesh = make_mesh(**config["mesh"])
    self.settings: Any = settings(sections[self.name], config[self.name], self.name)
    self.loop = settings(LoopConfig, config["loop"], "loop")
    self.data = self.read_data(settings(sections["data"], config["data"], "data"))
    self.encoder: Any = load_text_encoder(config["init"])

  def read_data(self, section: Any) -> dict[str, Judged]:
    """Read the parts of the collection that `config.data` names. Raises ValueError with the fix."""
    return read_parts(section)

  @abc.abstractmethod
  def phase(self) -> GradientPhase:
    """Return the training phase."""

  @abc.abstractmethod
  def compare(self, params: Params) -> tuple[dict[str, Scores], dict[str, float]]:
    """Score the rankings of the test part that are `compared`; return the scores and further values of the report."""

  def finished(self, params: Params) -> Params:
    """Return what is saved and reported of the parameters of the last step."""
    return params

  def start(self, evaluate: Callable[[Params], Mapping[str, float]]) -> Start:
    """Return the arguments of a phase that starts from the encoder; `evaluate` scores its parameters."""
    return {"mesh": self.mesh, "seed": self.config["seed"], "params": self.encoder.params, "evaluate": evaluate}

  @property
  def counted(self) -> dict[str, Judged]:
    """The collections whose sizes are printed and reported."""
    return self.data

  @property
  def counts(self) -> dict[str, int]:
    """The number of queries in each of them, as the report names it."""
    return {f"{name}.queries": len(data.queries) for name, data in self.counted.items()}

  def report(self, workdir: epath.PathLike, take: TakePhase) -> dict[str, Any]:
    """Take the phase's parameters, write the model, and write the report: `NAME.json`, `.csv` and `.png`."""
    workdir = epath.Path(workdir)
    if not is_local(workdir):
      raise ValueError(
        f"the workdir {workdir} is object storage, to which no {self.folder} can be written: give a folder on a disk"
      )
    folder = os.fspath(workdir / self.folder)
    self.encoder.check_folder(folder)  # an error comes now, not after the training
    print(sizes(self.counted), flush=True)
    with jax.set_mesh(self.mesh):
      params = self.finished(fetch(take(self.phase())))
    if jax.process_index() == 0:
      self.encoder.save(folder, params)
    scores, found = self.compare(params)
    return write_report(workdir, self.name, scores, {**self.counts, **found, "config": self.config})


def run(experiment: RankingExperiment, workdir: epath.PathLike) -> dict[str, Any]:
  """Train, write the model to the workdir, and report it beside the others that it is compared with."""
  return experiment.report(workdir, by_training(workdir, experiment.loop, {"config": experiment.config}))


def evaluate(experiment: RankingExperiment, workdir: epath.PathLike) -> dict[str, Any]:
  """Report as `run` does, but from the checkpoint of the last step."""
  return experiment.report(workdir, by_reading(workdir, {}))


def value_names(experiment: RankingExperiment) -> set[str]:
  """Return the names of the numbers that the report will have."""
  return names_of_values(experiment.compared, experiment.compared[0]) | experiment.counts.keys()


def planned(experiment: RankingExperiment) -> dict[str, GradientPhase]:
  """Make the phase to compile it."""
  phase = experiment.phase()
  return {phase.name: phase}


def print_plan(experiment: RankingExperiment, phase: GradientPhase) -> None:
  """Print the mesh, the parameters, and the memory that the compiled update needs."""
  with jax.set_mesh(experiment.mesh):
    print_encoder_plan(experiment.mesh, experiment.encoder.params, {phase.name: phase})
