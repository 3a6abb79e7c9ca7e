"""The protocol of experiments, and the code that they share: the model, the training of phases, the report."""

import csv
import importlib
import io
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, cast

import flax.linen as nn
import jax
from etils import epath
from jax.sharding import Mesh

from selfrag_jax.aot.programs import Program, compile_phases
from selfrag_jax.aot.table import print_mesh, print_model
from selfrag_jax.checked import Seed
from selfrag_jax.mesh import MeshConfig, absent
from selfrag_jax.model.config import ModelConfig, count_params
from selfrag_jax.model.lm import init_params
from selfrag_jax.reports.files import write_file
from selfrag_jax.settings import settings
from selfrag_jax.storage.atomic import json_bytes
from selfrag_jax.text.tokenizer import Tokenizer
from selfrag_jax.train.loop import LoopConfig, Phase, read_ended, train
from selfrag_jax.typing import Params

NAMES = (
  "refrag", "self_rag", "position_recall", "encoder", "second_query", "rerank", "retrieval", "documents", "rag",
  "reward_model", "qa", "gradient_rag", "search", "sweep",
)  # fmt: skip
# evaluation reads what `run` trained; the others make all that they need
READING = ("refrag", "rag", "self_rag", "encoder", "second_query", "rerank", "reward_model")
TRAINED: dict[str, Any] = {"seed": Seed, "mesh": MeshConfig, "init": str}  # the sections of every config that trains


class ExperimentModule(Protocol):
  """The functions of an experiment's module. `experiment` is the value that the module's own `build` returned."""

  def build(self, config: Mapping[str, Any], /) -> Any:
    """Check a config (nested dicts) and build its experiment. Raises ValueError with the fix for a wrong config."""
    ...

  def dry_run(self, experiment: Any, /) -> None:
    """Print the plan of a run; train and write nothing."""
    ...

  def run(self, experiment: Any, workdir: epath.PathLike, /) -> Any:
    """Train the phases, each from its newest checkpoint. An experiment without phases makes its report."""
    ...

  def evaluate(self, experiment: Any, workdir: epath.PathLike, /) -> dict[str, Any]:
    """Measure the models in the workdir, write the report there and return it."""
    ...

  def value_names(self, experiment: Any, /) -> set[str]:
    """Return the names of the numbers that the report will have."""
    ...


def find(name: str) -> ExperimentModule:
  """Return the module of an experiment. Raises ValueError for an unknown one."""
  if name not in NAMES:
    raise ValueError(f"config.experiment is {name!r}; one of {', '.join(NAMES)}")
  return cast(ExperimentModule, importlib.import_module(f"selfrag_jax.experiments.{name}"))


def plan(config: Mapping[str, Any], devices: Sequence[Any]) -> tuple[dict[str, int], list[Program]]:
  """Compile the programs of a config's phases for devices that are not there; return the mesh and the programs.

  Raises ValueError for an experiment that trains nothing.
  """
  import bm25s  # noqa: F401  # its import runs a JAX operation, which must not meet a mesh of absent devices

  module: Any = find(config["experiment"])
  if not hasattr(module, "planned"):
    raise ValueError(
      f"config.experiment is {config['experiment']!r}: it trains nothing, so there is nothing to compile"
    )
  with absent(devices):
    experiment = module.build(config)
    with jax.set_mesh(experiment.mesh):
      if isinstance(model := getattr(experiment, "model", None), ModelConfig):
        print_model(experiment.mesh, model)
      else:
        print_mesh(experiment.mesh)
      return dict(experiment.mesh.shape), compile_phases(module.planned(experiment))


def make_model(given: Mapping[str, Any], mesh: Mesh, pretrained: ModelConfig | None = None) -> ModelConfig:
  """Return a model's config: the fields `given`, and the others of a pretrained model.

  The dtype `auto` is bfloat16 where the devices have units for it, float32 on CPUs, and the matmul_dtype `auto` is the
  dtype. Raises ValueError for a field that gives the weights of a pretrained model other shapes.
  """
  fields = {**(pretrained.to_dict() if pretrained else {}), **given}
  if fields.get("dtype") == "auto":
    fields = {**fields, "dtype": "float32" if mesh.devices.flat[0].platform == "cpu" else "bfloat16"}
  if fields.get("matmul_dtype") == "auto":
    fields = {**fields, "matmul_dtype": None}
  model = settings(ModelConfig, fields, "model")
  if pretrained is not None and _weights(model) != _weights(pretrained):
    before = pretrained.to_dict()
    changed = ", ".join(name for name, value in given.items() if before.get(name) != value)
    raise ValueError(
      f"of {changed} in config.model, one gives the pretrained model's weights other shapes: leave it out"
    )
  return model


def _weights(model: ModelConfig) -> Any:
  """Return the names and shapes of a model's weights."""
  shapes = jax.eval_shape(partial(init_params, model), jax.random.key(0))
  return jax.tree.map(lambda leaf: leaf.shape, nn.unbox(shapes))


def metadata(config: Mapping[str, Any], model: ModelConfig, tokenizer: Tokenizer) -> dict[str, Any]:
  """Return the metadata of a language model's checkpoint: its config, its model and its tokenizer."""
  return {
    "config": config,
    "model": model.to_dict(),
    "tokenizer": {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint},
  }


def announce(model: ModelConfig, workdir: epath.PathLike) -> None:
  """Print the size and the block pattern of the model, and the workdir of its run."""
  pattern = model.to_dict()["block_pattern"]
  print(f"{count_params(model)['total']:,} parameters, block pattern {pattern}, workdir {workdir}", flush=True)


class TakePhase(Protocol):
  """A function that returns the model's parameters after a phase; `origin` adds the phase's start to its metadata."""

  def __call__(self, phase: Phase, **origin: Any) -> Params: ...


def by_training(workdir: epath.PathLike, loop: LoopConfig, metadata: Mapping[str, Any]) -> TakePhase:
  """Return the function that trains a phase to its end, from its newest checkpoint."""
  return lambda phase, **origin: phase.model_params(train(phase, workdir, loop, {**metadata, **origin}).params)


def by_reading(workdir: epath.PathLike, metadata: Mapping[str, Any]) -> TakePhase:
  """Return the function that reads the final parameters of a phase. It raises ValueError for an unfinished phase."""
  return lambda phase, **origin: read_ended(phase, workdir, {**metadata, **origin})


def write_report(
  workdir: epath.Path,
  name: str,
  report: Mapping[str, Any],
  rows: Iterable[Sequence[Any]],
  config: Mapping[str, Any] | None = None,
) -> None:
  """Write `NAME.csv` from rows that begin with the header, `config.json` if a config is given, and `NAME.json`.

  The report, `NAME.json`, is written last: where it exists, the other files are complete.
  """
  out = io.StringIO()
  csv.writer(out, lineterminator="\n").writerows(rows)
  write_file(workdir / f"{name}.csv", out.getvalue().encode())
  if config is not None:
    write_file(workdir / "config.json", json_bytes(config))
  write_file(workdir / f"{name}.json", json_bytes(report))
