"""What all launchers of experiments share: their flags, and that an error which the user can mend is one line."""

import importlib
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from absl import app, flags, logging
from ml_collections import config_flags

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

CONFIG = config_flags.DEFINE_config_file(
  "config", lock_config=True, help_string="A file of configs/, and after a colon its variant."
)
WORKDIR = flags.DEFINE_string(
  "workdir", None, "Where checkpoints, metrics and the report go (default: config.workdir)."
)


def build(argv: list[str], modules: Mapping[str, str]) -> tuple[ModuleType, Any]:
  """Return the module of the experiment that the config names, and the experiment. Nothing has been written then."""
  if len(argv) > 1:
    raise ValueError(f"unexpected argument {argv[1]!r}; overrides are written --config.rl.steps=50")
  if CONFIG.value is None:
    raise ValueError("which config? --config=configs/refrag.py, or another file of configs/")
  config = CONFIG.value.to_dict()
  from selfrag_jax.mesh import configure_xla, start_distributed

  configure_xla()
  start_distributed()
  if (name := config["experiment"]) not in modules:
    raise ValueError(f"config.experiment is {name!r}; {Path(sys.argv[0]).name} runs {', '.join(modules)}")
  module = importlib.import_module(modules[name])
  return module, module.build(config)


def run(main: Callable[[list[str]], None], failed: int = 1) -> None:
  """Parse the flags and run `main(argv)`. What the user can mend ends as `error: …` with the exit code `failed`.

  `--v=1` shows where such an error arose as well, and what the libraries log.
  """
  if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, interrupt)
  try:
    app.run(lambda argv: _one_line(main, argv), flags_parser=_parse)
  except SystemExit as ended:
    if not isinstance(ended.code, str):
      raise
    print(ended.code, file=sys.stderr)
    sys.exit(failed)


def interrupt(number: int, frame: FrameType | None) -> None:
  """Raise KeyboardInterrupt for a Ctrl-C, but later where it would be lost.

  Python drops what is raised in a callback of the garbage collector, and JAX has one: a program that makes many small
  objects, as the one that optimizes prompts, would go on after one Ctrl-C in ten.
  """
  if frame is None or frame.f_code.co_name != "_xla_gc_callback":
    raise KeyboardInterrupt
  threading.Timer(0.01, os.kill, (os.getpid(), number)).start()


def _one_line(main: Callable[[list[str]], None], argv: list[str]) -> None:
  if not logging.vlog_is_on(1):
    logging.set_verbosity(logging.WARNING)  # orbax writes dozens of INFO lines a checkpoint
  try:
    main(argv)
  except KeyboardInterrupt as interrupt:
    print(interrupt if str(interrupt) else "stopped", file=sys.stderr)
    sys.exit(130)
  except Exception as error:
    from selfrag_jax.files import FolderInUseError
    from selfrag_jax.memory.journal import StoreError
    from selfrag_jax.retrieval.folder import FolderError
    from selfrag_jax.textgrad import EngineError, GradientStoreError
    from selfrag_jax.train.checkpoint import CheckpointError
    from selfrag_jax.train.loop import NonFiniteLossError

    if isinstance(error, ModuleNotFoundError) and error.name in ("gguf", "huggingface_hub", "tokenizers"):
      sys.exit(f"error: {error.name} is not installed: pip install -e '.[weights]'")
    mendable = (ValueError, OSError, CheckpointError, NonFiniteLossError, FolderInUseError, FolderError)
    mendable = (*mendable, EngineError, GradientStoreError, StoreError)
    if isinstance(error, ImportError) and error.name is None:  # one of ours: it says what to install
      sys.exit(f"error: {error}")
    if logging.vlog_is_on(1) or not isinstance(error, mendable):
      raise
    is_config = isinstance(error, OSError) and "earlier failure to load" in str(error)  # words of ml_collections
    sys.exit(f"error: {_unread(error) if is_config else str(error).replace(chr(10), ' ')}")


def _unread(error: Exception) -> str:
  """Return why a config could not be read; ml_collections packs the reason into the last line."""
  reason = re.sub(r".*\[Errno \d+\] ", "", str(error).splitlines()[-1].strip())
  folder = Path(__file__).resolve().parents[1] / "configs"
  return f"{reason}; the path of a config begins in the folder that you are in, those of this project are in {folder}"


def _parse(argv: list[str]) -> list[str]:
  try:
    return flags.FLAGS(argv)
  except flags.Error as error:  # of an error in a config file the last line says what is wrong
    sys.exit(f"error: {str(error).strip().splitlines()[-1].strip().removeprefix('ValueError: ')}")
  except OSError as error:
    sys.exit(f"error: {_unread(error)}")
  except (AttributeError, KeyError) as error:  # an override of something that the config does not have
    reason = error.args[0].args[0] if isinstance(error.args[0], KeyError) else error.args[0]
    key, _, hint = str(reason).partition("\n")
    flag = next((arg for arg in argv if key.strip("'") in arg.split("=")[0].split(".")), None)
    if flag is None:  # a bug of the config file
      raise
    sys.exit(f"error: {flag}: unknown key {key}. {hint}")
