"""Plans of one config with other values of some keys, such as meshes or what is computed again, ranked by time."""

import ast
import copy
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from selfrag_jax.aot.programs import Program
from selfrag_jax.aot.table import as_json
from selfrag_jax.checked import suggestion
from selfrag_jax.chips import Chip
from selfrag_jax.model.config import CHOICES
from selfrag_jax.storage.atomic import write_json
from selfrag_jax.storage.json_lines import read_json_object

Plan = Callable[[dict[str, Any]], tuple[Mapping[str, int], list[Program]]]


def candidates(config: Mapping[str, Any], sweeps: Sequence[str], n_devices: int) -> list[dict[str, Any]]:
  """Return every combination of the values that are to be tried, as {key: value}.

  A sweep is `KEY=VALUE,VALUE…`, or short for one: `remat` for every choice of `model.remat` but `offload` (no bound
  tells how long the way to the host's memory takes), `mesh` for every power of two of `mesh.fsdp`, `mesh.data` taking
  the rest. Raises ValueError for a key that the config lacks, that comes twice, or that would train something else.
  """
  remats = ",".join(choice for choice in CHOICES["remat"] if choice != "offload")
  mesh = config.get("mesh", {})
  n_rows = n_devices // max(mesh.get("tensor", 1) * mesh.get("sequence", 1), 1)
  powers = ",".join(str(2**i) for i in range(n_rows.bit_length()) if n_rows % 2**i == 0)
  short = {"remat": [f"model.remat={remats}"], "mesh": ["mesh.data=-1", f"mesh.fsdp={powers}"]}
  axes: dict[str, list[Any]] = {}
  for sweep in sweeps:
    for one in short.get(sweep, [sweep]):
      key, _, values = one.partition("=")
      texts = values.split(",")
      if not all(texts):
        raise ValueError(f"--sweep={sweep} must be KEY=VALUE,VALUE or one of {', '.join(short)}")
      _require(config, key)
      if key in axes:
        raise ValueError(f"--sweep={sweep}: {key} is swept twice")
      axes[key] = [_value(text) for text in texts]
  return [dict(zip(axes, chosen, strict=True)) for chosen in itertools.product(*axes.values())]


def sweep(
  config: Mapping[str, Any], choices: Sequence[dict[str, Any]], chip: Chip, plan: Plan, about: dict[str, Any], path: str
) -> list[dict[str, Any]]:
  """Plan each choice, and return the plans in the order of `ranked`. With a `path`, finished ones are kept there.

  A choice that cannot be built or compiled has an `error` in place of `programs`, and is tried again by the next sweep.
  Raises ValueError if the file holds something else, and if no choice can be compiled.
  """
  done = [row for row in _read(path, about) if "programs" in row]
  known = {named(row["choice"]) for row in done}
  left = [choice for choice in choices if named(choice) not in known]
  print(f"{len(choices)} plans, {len(choices) - len(left)} of them made before", flush=True)
  started = time.monotonic()
  for number, choice in enumerate(left, 1):
    row: dict[str, Any] = {"choice": choice}
    try:
      mesh, programs = plan(_changed(config, choice))
      row |= {"mesh": dict(mesh), "programs": as_json(programs, mesh, chip)}
    except (ValueError, jax.errors.JaxRuntimeError) as error:  # the second: a compiler that runs out of memory
      row["error"] = " ".join(str(error).split())[:300]
    done.append(row)
    if path:
      write_json(Path(path), {"about": about, "plans": done})
    eta = (time.monotonic() - started) / number * (len(left) - number) / 60
    print(f"{number}/{len(left)}  {named(choice)}  ETA {eta:.0f} min", flush=True)
  wanted = set(map(named, choices))
  rows = ranked([row for row in done if named(row["choice"]) in wanted])
  if "error" in rows[0]:
    raise ValueError(f"none of the plans can be made; the first of them: {rows[0]['error']}")
  return rows


def ranked(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
  """Order plans: those that fit first, then by the seconds of a step of every phase.

  A loop of unknown length counts once. Only choices that leave the work of a step the same can be compared so.
  """

  def rank(row: dict[str, Any]) -> tuple[bool, bool, float]:
    return "error" in row, not fits(row), seconds(row)

  return sorted(rows, key=rank)


def fits(row: Mapping[str, Any]) -> bool:
  """Tell whether every program fits into a device."""
  return all(program["fits"] for program in row.get("programs", ()))


def seconds(row: Mapping[str, Any], overlapped: bool = False) -> float:
  """Return the bound of all programs together, if nothing is computed while something is sent or if all overlaps."""
  of = [bound for program in row.get("programs", ()) for bound in program["seconds"].values()]
  longest = lambda b: max(b.values()) if overlapped else max(b["products"], b["memory"]) + b["wire"]
  return sum(map(longest, of))


def named(choice: Mapping[str, Any]) -> str:
  """Return a choice as flags would set it."""
  return " ".join(f"{key}={value}" for key, value in choice.items())


def print_ranking(rows: Sequence[dict[str, Any]]) -> None:
  """Print the plans, the best first."""
  width = max(len(named(row["choice"])) for row in rows) + 2
  print(f"\n{'':{width}}{'memory':>8}{'overlapped':>14}{'in turn':>12}")
  for row in rows:
    if "error" in row:
      print(f"{named(row['choice']):{width}}{row['error']}")
      continue
    share = max(program["bytes"]["memory"] / program["bytes"]["device"] for program in row["programs"])
    times = f"{1e3 * seconds(row, True):11.3g} ms{1e3 * seconds(row):9.3g} ms"
    print(f"{named(row['choice']):{width}}{share:8.1%}{times}{'' if fits(row) else '  does not fit'}")


def _read(path: str, about: dict[str, Any]) -> list[dict[str, Any]]:
  if not path or not Path(path).exists():
    return []
  found = read_json_object(Path(path), "a sweep of launch/compile.py")
  if "plans" not in found:
    raise ValueError(f"{path} holds no sweep; give another --json")
  if found.get("about") != json.loads(json.dumps(about)):
    raise ValueError(f"{path} holds plans of another config, other devices or other versions; give another --json")
  return found["plans"]


def _require(config: Mapping[str, Any], key: str) -> None:
  """Raise ValueError for a key that the config lacks, or that chooses what is trained."""
  section: Any = config
  before = ""
  for part in key.split("."):
    if not isinstance(section, Mapping) or part not in section:
      names = section if isinstance(section, Mapping) else ()
      raise ValueError(f"the config has no {key}; {suggestion(part, names, before)}")
    section, before = section[part], f"{before}{part}."
  if isinstance(section, Mapping) or key == "experiment":
    raise ValueError(f"--sweep={key}: sweep the keys within a section, of one experiment")


def _changed(config: Mapping[str, Any], choice: Mapping[str, Any]) -> dict[str, Any]:
  changed = copy.deepcopy(dict(config))
  for key, value in choice.items():
    *sections, name = key.split(".")
    section = changed
    for part in sections:
      section = section[part]
    section[name] = value
  return changed


def _value(text: str) -> Any:
  try:
    return ast.literal_eval(text)
  except (ValueError, SyntaxError):
    return text
