"""Plans of one config with other values of some keys, such as meshes or what is computed again, ranked by time."""

import copy
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from selfrag_jax.aot.chips import Chip
from selfrag_jax.aot.programs import Program
from selfrag_jax.aot.table import as_json
from selfrag_jax.checked import suggestion
from selfrag_jax.model.config import CHOICES
from selfrag_jax.storage.atomic import write_json
from selfrag_jax.storage.json_lines import read_json_object

Plan = Callable[[dict[str, Any]], tuple[Mapping[str, int], list[Program]]]


def candidates(config: Mapping[str, Any], sweeps: Sequence[str], n_devices: int) -> list[dict[str, Any]]:
  """Return every combination of the values that are to be tried, as {key: value}.

  A sweep is `KEY=VALUE,VALUE…`, or short for one: `remat` for `model.remat` with every choice, `mesh` for `mesh.fsdp`
  with every power of two that divides the devices. Raises ValueError for a key that the config lacks.
  """
  powers = [2**i for i in range(n_devices.bit_length()) if n_devices % 2**i == 0]
  short = {"remat": "model.remat=" + ",".join(CHOICES["remat"]), "mesh": f"mesh.fsdp={','.join(map(str, powers))}"}
  axes: dict[str, list[Any]] = {}
  for sweep in sweeps:
    key, given, values = short.get(sweep, sweep).partition("=")
    if not given or not values:
      raise ValueError(f"--sweep={sweep} must be KEY=VALUE,VALUE or one of {', '.join(short)}")
    section, known = config, ""
    for part in key.split("."):
      if not isinstance(section, Mapping) or part not in section:
        names = section if isinstance(section, Mapping) else ()
        raise ValueError(f"--sweep={sweep}: the config has no {key}; {suggestion(part, names, known)}")
      section, known = section[part], f"{known}{part}."
    axes[key] = [_value(text) for text in values.split(",")]
  return [dict(zip(axes, chosen, strict=True)) for chosen in itertools.product(*axes.values())]


def sweep(
  config: Mapping[str, Any], choices: Sequence[dict[str, Any]], chip: Chip, plan: Plan, about: dict[str, Any], path: str
) -> list[dict[str, Any]]:
  """Plan each choice, and return what `ranked` needs of each in that order. With a `path`, done ones are kept there.

  A choice that cannot be built or compiled has an `error` in place of `programs`. Raises ValueError if the file holds
  a sweep about something else.
  """
  done = _read(path, about)
  started, n_new = time.monotonic(), 0
  for number, choice in enumerate(choices, 1):
    if any(row["choice"] == choice for row in done):
      continue
    row: dict[str, Any] = {"choice": choice}
    try:
      mesh, programs = plan(_changed(config, choice))
      row |= {"mesh": dict(mesh), "programs": as_json(programs, mesh, chip)}
    except (ValueError, RuntimeError) as error:  # a compiler that runs out of memory raises the second
      row["error"] = " ".join(str(error).split())[:300]
    done.append(row)
    if path:
      write_json(Path(path), {"about": about, "plans": done})
    n_new += 1
    left = (time.monotonic() - started) / n_new * (len(choices) - number) / 60
    print(f"{number}/{len(choices)}  {named(choice)}  ETA {left:.0f} min", flush=True)
  return ranked([row for row in done if row["choice"] in choices])


def ranked(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
  """Order plans: those that fit first, then by the seconds of their programs; a loop of unknown length counts once."""

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
  if found.get("about") != json.loads(json.dumps(about)):
    raise ValueError(f"{path} holds plans of another config or other devices; give another --json")
  return found["plans"]


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
    return json.loads(text)
  except json.JSONDecodeError:
    return text
