"""Programs that are compiled and not run."""

import functools
import sys
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import jax
from jax.sharding import Mesh

from selfrag_jax.aot import flops
from selfrag_jax.aot.hlo import Module, parse
from selfrag_jax.model.config import StepWork


class Traceable(Protocol):
  """What has programs to compile: a phase of a training, for instance."""

  @property
  def mesh(self) -> Mesh:
    """The devices of its programs."""
    ...

  def trace(self) -> dict[str, jax.stages.Traced]:
    """Trace its programs for devices that need not exist."""
    ...

  def model_work(self) -> StepWork | None:
    """Return the work of the model in its program `update`; None if not known."""
    ...


class Program(NamedTuple):
  """A compiled program. Sizes are in bytes on one device; results that take the place of arguments count as these."""

  name: str
  arguments: int
  temporary: int
  results: int
  seconds: float  # that it took to compile
  text: str  # of its HLO
  work: flops.Work  # FLOPs of all devices together
  useful: StepWork | None = None  # of the model, without any recomputation

  @property
  def memory(self) -> int:
    """The bytes that a device needs to run it."""
    return self.arguments + self.temporary + self.results

  @property
  def module(self) -> Module:
    """Its instructions."""
    return _parse(self.text)


@functools.lru_cache(8)
def _parse(text: str) -> Module:
  return parse(text)


def compile_phases(phases: Mapping[str, Traceable]) -> list[Program]:
  """Compile the programs of a step of each phase for the devices of its mesh, which need not exist."""
  programs = []
  for name, phase in phases.items():
    with jax.set_mesh(phase.mesh):
      for program, traced in phase.trace().items():
        programs.append(_compile(f"{name} {program}", traced, phase.model_work() if program == "update" else None))
  return programs


def _compile(name: str, traced: jax.stages.Traced, useful: StepWork | None) -> Program:
  print(f"compiling {name}", file=sys.stderr, flush=True)  # some take minutes
  started = time.monotonic()
  compiled = traced.lower().compile()
  seconds, text = time.monotonic() - started, compiled.as_text() or ""
  memory: Any = compiled.memory_analysis()
  results = memory.output_size_in_bytes - memory.alias_size_in_bytes
  sizes = memory.argument_size_in_bytes, memory.temp_size_in_bytes, results
  return Program(name, *sizes, seconds, text, _work(traced, _parse(text)), useful)


def _work(traced: jax.stages.Traced, module: Module) -> flops.Work:
  """Count what the compiled program computes, on all devices, and in kernels what the traced one asks for."""
  of_devices = {path: module.n_devices * work for path, work in flops.compiled(module).items()}
  return flops.count(traced.jaxpr, kernels_alone=True) + Counter(of_devices)
