"""The command line of knowledge bases: `python -m selfrag_jax.retrieval --documents FOLDER --output KB`.

Commands: build (may be left out), add, delete, search, inspect, validate, merge. `COMMAND --help` says more.
Exit codes: 0 done; 1 an error that the user can fix, in one line on standard error; 2 wrong arguments; 130 Ctrl-C.
"""

import argparse
import io
import sys
from collections.abc import Sequence
from pathlib import Path


def parser() -> argparse.ArgumentParser:
  """Return the parser of all commands."""
  main = argparse.ArgumentParser(
    prog="python -m selfrag_jax.retrieval", description="Build knowledge bases and look into them."
  )
  commands_of = main.add_subparsers(dest="command", required=True, metavar="COMMAND")

  def command(name: str, help: str) -> argparse.ArgumentParser:
    one = commands_of.add_parser(name, help=help, description=help)
    one.add_argument("--plugin", action="append", default=[], help="a module that registers a retriever of yours")
    one.add_argument("--traceback", action="store_true", help="show where an error arose")
    return one

  build = command("build", "Build a knowledge base from files. Run it again to go on after it was stopped.")
  add_build_arguments(build)
  add = command("add", "Add the documents of files to a knowledge base.")
  delete = command("delete", "Delete documents from a knowledge base, by id or by metadata.")
  search = command("search", "Search a knowledge base.")
  inspect = command("inspect", "Say what a knowledge base holds and how it was made.")
  validate = command("validate", "Check every file, that the parts agree, and that the encoder gives the same vectors.")
  merge = command("merge", "Put knowledge bases of one kind together; vectors of one encoder are taken over.")
  for one in (add, delete, search, inspect, validate):
    one.add_argument("--knowledge_base", required=True, metavar="KB", help="folder of the knowledge base")
  add.add_argument("--documents", required=True, nargs="+", metavar="FILE", help="files or folders")
  add.add_argument("--upsert", action="store_true", help="replace the documents whose ids are there already")
  for one in (build, add):
    one.add_argument("--skip_bad", action="store_true", help="leave out and count unreadable lines and files")
  delete.add_argument("--id", action="append", default=[], help="id of a document; may be given several times")
  for one in (delete, search):
    one.add_argument(
      "--where",
      action="append",
      default=[],
      metavar="'NAME=VALUE'",
      help="metadata, title or source with = >= > <= < or ~ (contains), quoted for the shell; all conditions must hold",
    )
  search.add_argument("query", nargs="+", help="what to look for; several queries are searched at once")
  search.add_argument("--top_k", type=_positive, default=5, help="documents per query (%(default)s)")
  for one in (search, inspect, validate):
    one.add_argument("--json", action="store_true", help="print JSON")
  validate.add_argument("--sample", type=_positive, default=32, help="documents that are embedded again (%(default)s)")
  merge.add_argument("knowledge_bases", nargs="+", metavar="KB", help="folders of the knowledge bases")
  merge.add_argument("--output", required=True, help="folder of the new knowledge base")
  return main


def add_build_arguments(build: argparse.ArgumentParser) -> None:
  """Add the arguments of `prepare_knowledge_base` to a parser."""
  build.add_argument(
    "--documents", required=True, nargs="+", metavar="FILE", help="files or folders: .jsonl .txt .md .html"
  )
  build.add_argument("--output", required=True, metavar="KB", help="folder of the knowledge base")
  build.add_argument("--type", help="simple, bm25, dense (the default), hybrid, or a retriever of your own")
  build.add_argument("--model", help="encoder of dense parts: token-bag, all-MiniLM-L6-v2, a folder or hub name")
  build.add_argument("--settings", metavar="JSON", help='settings of the retriever, such as {"k1": 0.9}')
  build.add_argument("--chunk_size", type=int, help="longest chunk, in --chunk_unit (180); 0: documents stay whole")
  build.add_argument("--chunk_overlap", type=int, help="overlap of consecutive chunks, in --chunk_unit (0)")
  build.add_argument("--chunk_method", choices=("word", "sentence", "recursive"), help="where to cut (recursive)")
  build.add_argument("--chunk_unit", choices=("word", "token"), help="words, or tokens of the encoder (word)")
  build.add_argument(
    "--near_duplicates",
    type=float,
    metavar="SIMILARITY",
    help="least similarity at which a chunk is left out as a duplicate; 1, the default: the same words",
  )
  build.add_argument(
    "--sync",
    action="store_true",
    help="update a knowledge base, with its old settings; embeds only new texts (token-bag: all, after any change)",
  )
  build.add_argument("--quiet", action="store_true", help="no progress")


def _positive(text: str) -> int:
  try:
    n = int(text)
  except ValueError:
    raise argparse.ArgumentTypeError(f"invalid: {text!r} is no whole number") from None
  if n < 1:
    raise argparse.ArgumentTypeError(f"{n} must be at least 1")
  return n


def main(argv: Sequence[str] | None = None) -> int:
  """Run a command and return the exit code."""
  given = list(sys.argv[1:] if argv is None else argv)
  if given and given[0].startswith("--") and given[0] != "--help":
    given.insert(0, "build")
  arguments = parser().parse_args(given)
  # imported after the arguments have been read: JAX takes a second to import, and --help should not wait for it
  from selfrag_jax.mesh import configure_xla
  from selfrag_jax.retrieval import commands
  from selfrag_jax.retrieval.base import import_plugins
  from selfrag_jax.storage.generation import FolderError
  from selfrag_jax.storage.lock import FolderInUseError
  from selfrag_jax.text.printable import printable

  configure_xla()
  if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that is not UTF-8 shows escapes
  try:
    sys.path.insert(0, str(Path.cwd()))  # plugins may lie in the working directory
    import_plugins(arguments.plugin)
    return getattr(commands, arguments.command)(arguments)
  except KeyboardInterrupt:
    print("stopped; run the same again to go on", file=sys.stderr)
    return 130
  except (ValueError, OSError, KeyError, FolderError, FolderInUseError) as error:
    if arguments.traceback:
      raise
    print(f"error: {printable(str(error.args[0] if isinstance(error, KeyError) else error))}", file=sys.stderr)
    return 1


if __name__ == "__main__":
  sys.exit(main())
