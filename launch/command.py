"""The common part of the launchers: their flags, and errors in one line for mistakes that the user can mend."""

import contextlib
import dataclasses
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from absl import app, flags, logging
from ml_collections import config_flags

if TYPE_CHECKING:
  from selfrag_jax.experiments.base import ExperimentModule
  from selfrag_jax.hosts import Place

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

HOSTS = ("coordinator", "num_processes", "process_id")  # Slurm, Open MPI, Cloud TPU and GKE tell them, too

CONFIG = config_flags.DEFINE_config_file(
  "config", lock_config=True, help_string="A file of configs/; after a colon, its variant."
)
WORKDIR = flags.DEFINE_string(
  "workdir", None, "Where checkpoints, metrics and the report go (default: config.workdir)."
)
MESH = flags.DEFINE_string("mesh", None, "Sizes of the mesh for a machine, such as host, v5e-256 or h100-8.")
COORDINATOR = flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0, for a run of several processes.")
NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "How many processes run this; 1: alone, on a cluster, too.")
PROCESS_ID = flags.DEFINE_integer("process_id", None, "The number of this process, from 0 on.")
DRY_RUN = flags.DEFINE_bool("dry_run", False, "Print what would run, such as mesh, parameters and memory, and stop.")


def read(argv: list[str]) -> dict[str, Any]:
  """Return the config as nested dicts. Raises ValueError if there is none, or if it names no known experiment."""
  if len(argv) > 1:
    raise ValueError(f"unexpected argument {argv[1]!r}; overrides are written --config.rl.steps=50")
  if not flags.FLAGS["config"].present:
    raise ValueError("which config? --config=configs/refrag.py, or another file of configs/")
  path = config_flags.get_config_filename(flags.FLAGS["config"])
  try:
    config = CONFIG.value.to_dict()
  except AttributeError:
    raise ValueError(f"{path}: get_config() returned {CONFIG.value!r:.60}, it must return a ConfigDict") from None
  from selfrag_jax.experiments.base import NAMES

  if (name := config.get("experiment")) not in NAMES:
    known = f"{Path(sys.argv[0]).name} runs {', '.join(NAMES)}"
    missing = f"the config of {path} has no experiment"
    raise ValueError(f"config.experiment is {name!r}; {known}" if "experiment" in config else f"{missing}; {known}")
  return config if MESH.value is None else _on_mesh(config, MESH.value)


def _on_mesh(config: dict[str, Any], name: str) -> dict[str, Any]:
  """Return a config with the mesh of a preset. Raises ValueError if there is no such one, or nothing to set."""
  from selfrag_jax.mesh import PRESETS

  if name not in PRESETS:
    raise ValueError(f"--mesh={name}: the meshes are {', '.join(PRESETS)}; others are set by --config.mesh.fsdp=4")
  if "mesh" not in config:
    raise ValueError(f"--mesh={name}: this config runs on no mesh")
  if given := [flag for flag in sys.argv if flag.lstrip("-").startswith("config.mesh.")]:
    raise ValueError(f"--mesh={name} sets every size of the mesh; give it, or {given[0]}")
  return {**config, "mesh": dataclasses.asdict(PRESETS[name])}


def output(config: Mapping[str, Any]) -> str:
  """Return the workdir. Raises ValueError or OSError if it cannot be used."""
  from selfrag_jax.train.workdir import check_workdir

  workdir = config.get("workdir", "") if WORKDIR.value is None else WORKDIR.value
  if not isinstance(workdir, str):
    raise ValueError(f"config.workdir is {workdir!r}; it must be the name of a folder")
  check_workdir(workdir, config["experiment"])
  return workdir


def build(config: Mapping[str, Any]) -> "tuple[ExperimentModule, Any]":
  """Return the module of the experiment that the config names, and the experiment. Write nothing."""
  place = start("" if "mesh" in config else config["experiment"])
  if place and place.process_id:
    with open(os.devnull, "w") as silence:
      os.dup2(silence.fileno(), 1)  # process 0 tells what all of them know; errors are each one's own
  from selfrag_jax.experiments.base import find

  module = find(config["experiment"])
  return module, module.build(config)


def start(alone: str = "") -> "Place | None":
  """Start JAX, with the other processes of the run if there are any, and return the place of this one among them.

  Raises ValueError if what is named `alone` is one of several.
  """
  from selfrag_jax import hosts
  from selfrag_jax.mesh import configure_xla

  configure_xla()
  place = hosts.find(COORDINATOR.value, NUM_PROCESSES.value, PROCESS_ID.value)
  if place and alone:
    raise ValueError(f"{alone} runs in one process, this is one of {place.num_processes}; --num_processes=1 is alone")
  hosts.join(place)
  return place


def run(main: Callable[[list[str]], None], failed: int = 1) -> None:
  """Parse the flags and run `main(argv)`. A user's mistake ends as `error: …` with the exit code `failed`.

  `--v=1` also shows where the error arose, and the logs of the libraries.
  """
  from selfrag_jax.train.interrupt import interrupt

  if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, interrupt)
  try:
    app.run(lambda argv: _one_line(main, argv), flags_parser=_parse)
  except SystemExit as ended:
    if not isinstance(ended.code, str):
      raise
    from selfrag_jax.text.printable import printable  # file names and config values may hold any characters

    with contextlib.suppress(OSError):  # whoever read the errors may have gone
      print(printable(ended.code), file=sys.stderr)
    _end(ended.code, failed)
  except KeyboardInterrupt as stopped:
    with contextlib.suppress(OSError):  # whoever read the output may have gone
      print(stopped if str(stopped) else "stopped", file=sys.stderr, flush=True)
      sys.stdout.flush()
    from selfrag_jax import hosts

    hosts.leave("stopped by hand")
    os._exit(130)  # XLA may still be compiling, and would crash while the interpreter ends
  except Exception as error:  # a bug, or --v=1: Python's own exit code would be 1, whatever `failed` is
    with contextlib.suppress(OSError):
      traceback.print_exc()
    _end(repr(error), failed)


def _end(reason: str, code: int) -> NoReturn:
  """Exit after an error. Of several processes, the others end too: they would wait for this one."""
  from selfrag_jax import hosts

  if hosts.joined():
    hosts.leave(reason)
    with contextlib.suppress(OSError):
      sys.stdout.flush()
    os._exit(code)  # JAX would wait for the others before it lets this one end
  sys.exit(code)


def _one_line(main: Callable[[list[str]], None], argv: list[str]) -> None:
  if not logging.vlog_is_on(1):
    logging.set_verbosity(logging.WARNING)  # orbax writes dozens of INFO lines a checkpoint
  from selfrag_jax.storage.atomic import os_errors

  try:
    with os_errors():
      main(argv)
  except Exception as error:
    from selfrag_jax import hosts
    from selfrag_jax.memory.journal import StoreError
    from selfrag_jax.storage.generation import FolderError
    from selfrag_jax.storage.lock import FolderInUseError
    from selfrag_jax.textgrad import EngineError, GradientStoreError
    from selfrag_jax.train.checkpoint import CheckpointError
    from selfrag_jax.train.loop import TrainingError

    hosts.settle()
    if isinstance(error, ModuleNotFoundError) and error.name in ("gguf", "tokenizers"):
      sys.exit(f"error: {error.name} is not installed: pip install -e '.[weights]'")
    mendable = (ValueError, OSError, CheckpointError, TrainingError, FolderInUseError, FolderError)
    mendable = (*mendable, EngineError, GradientStoreError, StoreError)
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):  # the second is XLA's error
      first = " ".join(str(error).split())[:200]
      sys.exit(f"error: not enough memory; smaller sizes, such as of a batch, take less. {first}".strip())
    if isinstance(error, ImportError) and error.name is None:  # this package's own: says what to install
      sys.exit(f"error: {error}")
    if logging.vlog_is_on(1) or not isinstance(error, mendable):
      raise
    is_config = isinstance(error, OSError) and "earlier failure to load" in str(error)  # ml_collections' words
    sys.exit(f"error: {_unread(error) if is_config else str(error).replace(chr(10), ' ')}")


def _unread(error: Exception) -> str:
  """Return why a config could not be read; ml_collections packs the reason into the last line."""
  reason = re.sub(r".*(\[Errno \d+\]|failure to load:) ", "", str(error).splitlines()[-1].strip()).rstrip(".")
  folder = Path(__file__).resolve().parents[1] / "configs"
  return f"{reason}; the path of a config begins in the folder that you are in, those of this project are in {folder}"


def _in_config(error: BaseException, argv: list[str]) -> str | None:
  """Return the place in a config file where an error arose, with its reason; None if it arose elsewhere."""
  while error.__context__ is not None:  # ml_collections and absl raise other errors in its place
    error = error.__context__
  if isinstance(error, SyntaxError) and error.filename:
    return f"{error.filename}, line {error.lineno}: {error.msg}"
  frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
  library = [place for place, frame in enumerate(frames) if frame.filename == config_flags.config_flags.__file__]
  own = frames[library[-1] + 1 :] if library else []
  reason = " ".join(str(error).split())
  if own:
    line = [frame.lineno for frame in own if frame.filename == own[0].filename][-1]
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return f"{own[0].filename}, line {line}: {kind}{reason}"
  flag = next((arg for arg in argv if arg.startswith(("--config=", "-config="))), "--config")
  # Python before 3.11.4 tells of null bytes by a ValueError
  is_of_file = isinstance(error, SyntaxError) or "get_config" in reason or "null bytes" in reason
  return f"{flag}: {reason}" if is_of_file else None


def _parse(argv: list[str]) -> list[str]:
  if {"-h", "-help", "--help", "-helpshort", "--helpshort"} & set(argv):
    main = sys.modules["__main__"]
    more = "--helpfull lists the flags of the libraries too."
    with contextlib.suppress(BrokenPipeError):  # `| head` has read enough
      print((main.__doc__ or "").strip(), flags.FLAGS.main_module_help(), "", more, sep="\n", flush=True)
    os._exit(0)  # sys.exit would write the rest once more
  logging.set_verbosity(logging.ERROR)  # hide the warnings about an unreadable config: it ends as an error below
  try:
    rest = flags.FLAGS(argv)
    own = {flag.name for flag in flags.FLAGS.get_key_flags_for_module(argv[0])}
    if foreign := [
      name for name in ("config", "workdir", "mesh", "dry_run", *HOSTS) if flags.FLAGS[name].present and name not in own
    ]:
      raise flags.Error(f"{Path(argv[0]).name} has no flag --{foreign[0]}")
    return rest
  except Exception as error:
    if not isinstance(error, OSError) and (where := _in_config(error, argv)):
      sys.exit(f"error: {where}")
    return _refuse(error, argv)


def _refuse(error: Exception, argv: list[str]) -> NoReturn:
  """Exit with one line about a mistake in the flags; raise every other error again."""
  try:
    raise error
  except flags.Error as error:
    sys.exit(f"error: {str(error).strip().splitlines()[-1].strip().removeprefix('ValueError: ')}")
  except OSError as error:
    sys.exit(f"error: {_unread(error)}")
  except (AttributeError, KeyError) as error:  # an override of a key that the config lacks
    reason = error.args[0].args[0] if isinstance(error.args[0], KeyError) else error.args[0]
    key, _, hint = str(reason).partition("\n")
    flag = next((arg for arg in argv if key.strip("'") in arg.split("=")[0].split(".")), None)
    if flag is None:  # a bug in the config file
      raise
    sys.exit(f"error: {flag}: unknown key {key}. {hint}")
