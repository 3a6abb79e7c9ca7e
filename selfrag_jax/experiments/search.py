"""The search of a memory of random rows: how long it takes on the devices, and a program to plan for absent ones."""

import dataclasses
import statistics
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import Mesh, NamedSharding

from selfrag_jax.aot.programs import compile_phases
from selfrag_jax.aot.table import print_memory, print_mesh
from selfrag_jax.checked import Checked, Count, Seed
from selfrag_jax.experiments import base
from selfrag_jax.memory import topk
from selfrag_jax.memory.scoring import Metric
from selfrag_jax.memory.state import MemoryRows, filled, init_rows, partition_specs
from selfrag_jax.memory.topk import Method
from selfrag_jax.mesh import AXES, MeshConfig, abstract, make_mesh, replicated
from selfrag_jax.model.config import StepWork
from selfrag_jax.settings import read_config, settings
from selfrag_jax.typing import Array

NOISE = 0.1  # standard deviations, between a query and the row that it was made of


@dataclasses.dataclass(frozen=True)
class MemorySection(Checked):
  """A memory of random rows, split over all devices; there are as many rows more as make every part of one size."""

  rows: Count = 100_000
  width: Count = 384
  dtype: Literal["float32", "bfloat16", "int8"] = "float32"


@dataclasses.dataclass(frozen=True)
class SearchSection(Checked):
  """Searches for `queries` at a time, which are rows of the memory with noise; `repeats` of them are timed."""

  queries: Count = 32
  k: Count = 8
  metric: Literal["cosine", "dot"] = "cosine"
  method: Literal["exact", "approx"] = "exact"
  repeats: Count = 20


SECTIONS = {"seed": Seed, "mesh": MeshConfig, "memory": MemorySection, "search": SearchSection}


@dataclasses.dataclass
class Experiment:
  """A memory and the searches in it. `rows` is the number of its rows."""

  config: dict[str, Any]
  mesh: Mesh
  memory: MemorySection
  search: SearchSection
  rows: int

  @property
  def shardings(self) -> MemoryRows:
    """The sharding of each array of the memory: rows over all axes of the mesh."""
    state = jax.eval_shape(partial(init_rows, self.rows, self.memory.width, dtype=self.memory.dtype))
    return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), partition_specs(state, AXES))

  def find(self, state: MemoryRows, queries: Array) -> Any:
    """Search the memory."""
    metric: Metric = self.search.metric
    method: Method = self.search.method
    return topk.search(state, queries, self.search.k, metric=metric, method=method, mesh=self.mesh, axis=AXES)

  def trace(self) -> dict[str, jax.stages.Traced]:
    """Trace a search for the devices of the mesh, which need not exist."""
    state = jax.eval_shape(partial(init_rows, self.rows, self.memory.width, dtype=self.memory.dtype))
    queries = jax.ShapeDtypeStruct((self.search.queries, self.memory.width), jnp.float32)
    return {
      self.search.method: jax.jit(self.find).trace(
        abstract(state, self.shardings), abstract(queries, replicated(self.mesh))
      )
    }

  def model_work(self) -> StepWork | None:
    """Return None: there is no model."""
    return None


def build(config: Mapping[str, Any]) -> Experiment:
  """Check a config (nested dicts) and build its experiment. Raises ValueError with the fix for a wrong config."""
  config = read_config(config, SECTIONS)
  memory, search = (
    settings(MemorySection, config["memory"], "memory"),
    settings(SearchSection, config["search"], "search"),
  )
  mesh = make_mesh(**config["mesh"])
  return Experiment(config, mesh, memory, search, -(-memory.rows // mesh.devices.size) * mesh.devices.size)


def planned(experiment: Experiment) -> dict[str, Experiment]:
  """Return what is compiled: the search."""
  return {"search": experiment}


def dry_run(experiment: Experiment) -> None:
  """Print the mesh and the memory that a search needs."""
  print_mesh(experiment.mesh)
  print_memory(compile_phases(planned(experiment)))


def run(experiment: Experiment, workdir: epath.PathLike) -> dict[str, Any]:
  """Do what `evaluate` does: nothing is trained."""
  return evaluate(experiment, workdir)


def evaluate(experiment: Experiment, workdir: epath.PathLike) -> dict[str, Any]:
  """Fill a memory, time searches in it, and write `search.json` and `.csv`."""
  section, width, key = experiment.search, experiment.memory.width, jax.random.key(experiment.config["seed"])
  rows = lambda key: jax.random.normal(key, (experiment.rows, width))
  fill = jax.jit(lambda key: filled(rows(key), experiment.memory.dtype), out_shardings=experiment.shardings)
  state = fill(key)
  chosen = np.random.default_rng(experiment.config["seed"]).integers(0, experiment.rows, section.queries)
  noise = NOISE * jax.random.normal(jax.random.fold_in(key, 1), (section.queries, width))
  ask = lambda key, noise: rows(key)[chosen] + noise
  queries = jax.jit(ask, out_shardings=replicated(experiment.mesh))(key, noise)
  find, times = jax.jit(experiment.find), []
  found = jax.block_until_ready(find(state, queries))
  for _ in range(section.repeats):
    began = time.perf_counter()
    jax.block_until_ready(find(state, queries))
    times.append(time.perf_counter() - began)
  n_bytes = experiment.rows * width * np.dtype(experiment.memory.dtype).itemsize
  report = {
    "rows": experiment.rows,
    "bytes": n_bytes,
    "devices": experiment.mesh.devices.size,
    "ms": 1e3 * statistics.median(times),
    "ms_least": 1e3 * min(times),
    "gb_per_second": n_bytes / statistics.median(times) / 1e9,
    "found": float((np.asarray(found.slots)[:, 0] == chosen).mean()),
  }
  base.write_report(epath.Path(workdir), "search", report, [("name", "value"), *report.items()], experiment.config)
  kind = experiment.mesh.devices.flat[0].device_kind
  print(
    f"{report['rows']:,} rows of {width} {experiment.memory.dtype} on {report['devices']} {kind}: {section.queries} "
    f"queries in {report['ms']:.3g} ms (least {report['ms_least']:.3g}), {report['gb_per_second']:.3g} GB/s of "
    f"embeddings; {report['found']:.3f} of the queries found the row that they were made of"
  )
  return report


def value_names(experiment: Experiment) -> set[str]:
  """Return the names of the numbers that the report will have."""
  return {"rows", "bytes", "devices", "ms", "ms_least", "gb_per_second", "found"}
