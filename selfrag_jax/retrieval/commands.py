"""The commands of `python -m selfrag_jax.retrieval`: each takes its parsed arguments and prints its result."""

import json
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from selfrag_jax.memory.filters import parse_where
from selfrag_jax.retrieval.base import BaseRetriever, load
from selfrag_jax.retrieval.document import FILE, Document
from selfrag_jax.retrieval.folder import check_output
from selfrag_jax.retrieval.knowledge_base import merge_knowledge_bases, prepare_knowledge_base
from selfrag_jax.retrieval.listing import told_kinds
from selfrag_jax.retrieval.manager import RetrievalManager
from selfrag_jax.retrieval.reading import dense_parts
from selfrag_jax.retrieval.sources import READERS
from selfrag_jax.storage.generation import sizes
from selfrag_jax.text.printable import printable

SHOWN = 200  # characters of a document that are printed


def build(arguments: Namespace) -> int:
  """Build a knowledge base, or bring it up to date."""
  report = prepare_knowledge_base(
    arguments.documents,
    arguments.output,
    arguments.type,
    settings=parse_settings(arguments.settings, arguments.model, arguments.type),
    chunking=given_chunking(
      arguments.chunk_size, arguments.chunk_overlap, arguments.chunk_method, arguments.chunk_unit
    ),
    near_duplicates=arguments.near_duplicates,
    sync=arguments.sync,
    skip_bad=arguments.skip_bad,
    progress=not arguments.quiet,
  )
  print(told(arguments.output, report))
  return 0


def add(arguments: Namespace) -> int:
  """Add the documents of files, cut into chunks as the knowledge base was built."""
  manager = RetrievalManager(knowledge_base_path=arguments.knowledge_base)
  check_output(arguments.knowledge_base)  # before anything is embedded
  report = manager.add_files(arguments.documents, upsert=arguments.upsert, skip_bad=arguments.skip_bad)
  manager.save_knowledge_base(arguments.knowledge_base)
  print(told(arguments.knowledge_base, {"documents": len(manager.retriever), **report}))
  return 0


def delete(arguments: Namespace) -> int:
  """Delete documents by id or by metadata."""
  retriever = load(arguments.knowledge_base)
  where = parse_where(arguments.where)
  deleted = retriever.delete(arguments.id or None, where=where or None)
  retriever.save(arguments.knowledge_base)
  print(f"deleted {deleted:,}; {printable(arguments.knowledge_base)} has {len(retriever):,} documents")
  return 0


def search(arguments: Namespace) -> int:
  """Print the documents found for each query."""
  retriever = load(arguments.knowledge_base)
  if not all(query.strip() for query in arguments.query):
    raise ValueError("a query is empty; say what to look for")
  found = retriever.retrieve_batch(arguments.query, arguments.top_k, where=parse_where(arguments.where) or None)
  if arguments.json:
    rows = zip(arguments.query, found, strict=True)
    # in ASCII, which any terminal can show, and which holds no control characters
    print(json.dumps([{"query": q, "documents": [d.to_dict() for d in ds]} for q, ds in rows]))
    return 0
  for query, documents in zip(arguments.query, found, strict=True):
    print(f"{printable(query)}{'' if documents else ': nothing found'}")
    for rank, document in enumerate(documents, 1):
      print(f"{rank:3}. {document.score:.4f}  {_named(document)}\n     {_shown(document.content)}")
  return 0


def inspect(arguments: Namespace) -> int:
  """Print the contents and the build settings of a knowledge base."""
  retriever, held = load(arguments.knowledge_base), sizes(arguments.knowledge_base)
  dense = [{"model": p.settings["model_name"], "shape": list(p.vectors.shape)} for p in dense_parts(retriever)]
  described = {
    "type": retriever.name,
    "settings": retriever.settings,
    "documents": len(retriever),
    "embeddings": dense,
    "build": {name: value for name, value in retriever.build.items() if name != "files"},
    "sources": len(retriever.build.get("files", {})),
    "added_by_hand": sum(FILE not in document.metadata for document in retriever.documents),
    "bytes": held,
  }
  if arguments.json:
    print(json.dumps(described, default=list))
    return 0
  for name, value in described.items():
    print(f"{name:14} {printable(json.dumps(value, ensure_ascii=False, default=list))}")
  for document in retriever.documents[:3]:
    print(f"  {_named(document)}: {_shown(document.content)}")
  return 0


def validate(arguments: Namespace) -> int:
  """Check the digests, that documents and vectors agree, and that the encoder still gives the same vectors."""
  retriever = load(arguments.knowledge_base)  # this checks the digests, and that each document has a vector
  empty = [document.id for document in retriever.documents if not document.text.strip()]
  problems = [f"{len(empty)} documents are empty, such as {empty[0]}"] if empty else []
  problems += _changed_encoders(retriever, arguments.sample)
  held = len(sizes(arguments.knowledge_base))
  report = {"documents": len(retriever), "files": held, "problems": problems}
  if arguments.json:
    print(json.dumps(report))
  elif not problems:
    print(f"{printable(arguments.knowledge_base)}: {len(retriever):,} documents in {held} files, all as written")
  for problem in problems if not arguments.json else ():
    print(printable(f"{arguments.knowledge_base}: {problem}"))
  return 1 if problems else 0


def merge(arguments: Namespace) -> int:
  """Merge knowledge bases into a new one."""
  merged = merge_knowledge_bases(arguments.knowledge_bases, arguments.output)
  print(f"{printable(arguments.output)} has {merged:,} documents")
  return 0


def told(output: str, report: Mapping[str, Any]) -> str:
  """Return the closing lines of a build: the counts, and the files and lines that were left out."""
  lines = [f"{output}: " + ", ".join(f"{name} {n:,}" for name, n in report.items() if isinstance(n, int))]
  if kinds := report["left_out"]:
    lines.append(f"left out {sum(kinds.values()):,} that are no {', '.join(READERS)}: {told_kinds(kinds)}")
  lines += [f"left out: {problem}" for problem in report["problems"]]
  if (more := report["bad"] - len(report["problems"])) > 0:
    lines.append(f"left out: {more:,} more")
  return "\n".join(map(printable, lines))


def given_chunking(*values: int | str | None) -> dict[str, Any]:
  """Return the arguments of `Chunking` that were given; the values are size, overlap, method and unit, None if not."""
  names = ("size", "overlap", "method", "unit")
  return {name: value for name, value in zip(names, values, strict=True) if value is not None}


def parse_settings(text: str | None, model: str | None, retriever_type: str | None) -> dict[str, Any] | None:
  """Return the settings of a retriever from JSON and the encoder name of its dense part; None if neither is given.

  Raises ValueError for text that is no JSON object, and for a `model` of a retriever that is neither dense nor hybrid.
  """
  if text is None and model is None:
    return None
  text, retriever_type = text or "{}", retriever_type or "dense"
  try:
    settings = json.loads(text)
  except ValueError as error:
    raise ValueError(f"--settings {text}: {error}") from None
  if not isinstance(settings, dict):
    raise ValueError(f"--settings {text} is no JSON object")
  if model is None:
    return settings
  if retriever_type == "dense":
    return {**settings, "model_name": model}
  if retriever_type == "hybrid" and "retrievers" not in settings:
    return {**settings, "retrievers": ["bm25", "dense"], "settings": [{}, {"model_name": model}]}
  raise ValueError(f"--model names the encoder of dense and hybrid; for {retriever_type} use --settings")


def _changed_encoders(retriever: BaseRetriever, sample: int) -> list[str]:
  problems = []
  for part in dense_parts(retriever):
    name = part.settings["model_name"]
    try:
      others = part.changed(sample)
    except ValueError as error:
      problems.append(f"{name} is another encoder than the one that built this: {error}")
      continue
    if others:
      problems.append(
        f"{name} gives other vectors for {len(others)} of {min(sample, len(part))} documents, such as {others[0]}: "
        "it is another encoder than the one that built this"
      )
  return problems


def _named(document: Document) -> str:
  return f"{_shown(document.id)}  {_shown(document.title)}"


def _shown(text: str) -> str:
  text = printable(" ".join(text.split()))
  return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"
