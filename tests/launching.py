"""Commands as a user starts them, forked from a process that has imported JAX: the import is most of a short command.

A command gets its own arguments, environment, folder and files, and ends as a Python process does. What must be a
process of its own from the start (to be killed, or to be asked what it imports) does not belong here.
"""

import atexit
import gc
import importlib
import json
import os
import pkgutil
import runpy
import signal
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def launch(
  program: str,
  *flags: str | Path,
  cwd: str | Path = ROOT,
  env: dict[str, str] | None = None,
  text: str = "",
  imported: tuple[str, ...] = (),
) -> subprocess.CompletedProcess[str]:
  """Run `python PROGRAM FLAG ...` to its end and return its code and what it wrote.

  `program` is a path below the repository, or `-m MODULE`; `env` replaces the environment, `text` is its input.
  `imported` names more modules that the process has imported before it forks.
  """
  with tempfile.TemporaryDirectory() as folder:
    files = [str(Path(folder) / name) for name in ("in", "out", "err")]
    Path(files[0]).write_text(text)
    request = {"program": program, "flags": list(map(str, flags)), "cwd": str(cwd), "files": files}
    server = _server(imported)
    print(json.dumps(request | {"env": dict(os.environ if env is None else env)}), file=server.stdin, flush=True)
    if not (said := server.stdout.readline()):
      raise RuntimeError("the process that forks has ended; see above for its error")
    code = int(said)
    out, err = (Path(file).read_text() for file in files[1:])
  return subprocess.CompletedProcess([program, *request["flags"]], code, out, err)


@cache
def _server(imported: tuple[str, ...]) -> subprocess.Popen[str]:
  server = subprocess.Popen(
    [sys.executable, __file__, *imported], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
  )
  atexit.register(server.communicate)
  return server


def serve(imported: list[str]) -> None:
  """Fork for each request."""
  import ml_collections.config_flags  # noqa: F401

  from selfrag_jax import experiments

  for module in pkgutil.iter_modules(experiments.__path__):  # with JAX, Flax, Optax and Orbax
    importlib.import_module(f"{experiments.__name__}.{module.name}")
  for name in ("tensorboardX", *imported):  # which imports PyTorch, where there is one
    importlib.import_module(name)
  gc.freeze()  # a collection in a fork would copy all pages
  answers = os.fdopen(os.dup(1), "w")
  for line in sys.stdin:
    request = json.loads(line)
    if not (child := os.fork()):
      for number, file in enumerate(request["files"]):
        os.dup2(os.open(file, os.O_RDWR | os.O_CREAT), number)
      run(request)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(code, file=answers, flush=True)


def run(request: dict) -> None:
  """Become the command, and end."""
  signal.alarm(600)  # a command that hangs is killed
  sys.stdin = os.fdopen(0)  # the old one has read ahead
  os.environ.clear()
  os.environ.update(request["env"])
  os.chdir(request["cwd"])
  module = request["program"].removeprefix("-m ")
  sys.argv = [module, *request["flags"]]
  if module == request["program"]:
    script = str(ROOT / module)
    sys.path[0] = os.path.dirname(script)
    runpy.run_path(script, run_name="__main__")
  else:
    sys.path[0] = request["cwd"]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
  sys.exit(0)


if __name__ == "__main__":
  serve(sys.argv[1:])
