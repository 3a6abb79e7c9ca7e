"""Readers of document collections with judged queries, in the layout of BEIR (arXiv 2104.08663).

corpus.jsonl                      lines of {_id, title, text}
queries.jsonl                     lines of {_id, text}
qrels.tsv or qrels/SPLIT.tsv      query-id, corpus-id and score, below one line of headings
"""

import dataclasses
import math
import reprlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from etils import epath

from selfrag_jax.checked import Checked, Positive
from selfrag_jax.retrieval.document import Document
from selfrag_jax.storage.hub import locate_data
from selfrag_jax.storage.json_lines import read_jsonl, read_lines

# 254 documents about countries and capitals, 70 questions that one document answers and 60 that need two documents
EXAMPLE = Path(__file__).resolve().parents[1] / "data" / "world"

FILES = ("corpus.jsonl", "queries.jsonl", "qrels.tsv", "qrels/*.tsv")
Qrels = dict[str, dict[str, float]]  # query id -> document id -> grade, above 0


class Judged(NamedTuple):
  """A collection of documents, and the texts and grades of all queries that have a relevant document."""

  documents: list[Document]
  queries: dict[str, str]
  qrels: Qrels

  def only(self, chosen: Collection[str]) -> "Judged":
    """Return the collection with only these queries."""
    return self._replace(queries={id: self.queries[id] for id in chosen}, qrels={id: self.qrels[id] for id in chosen})


def locate_beir(path: epath.PathLike) -> epath.Path:
  """Return the folder of a collection, which may be named on the Hugging Face hub. Raises like `locate_data`."""
  return locate_data(path, FILES)


def read_beir(path: epath.PathLike, split: str = "test") -> Judged:
  """Read the collection in a folder, or of a name on the hub; `split` names a file of `qrels/`, if that folder exists.

  Raises FileNotFoundError for a missing file; ValueError, with file and line, for a line that is wrong.
  """
  folder = locate_beir(path)
  qrels = folder / "qrels" / f"{split}.tsv" if (folder / "qrels").is_dir() else folder / "qrels.tsv"
  for file in (folder / "corpus.jsonl", folder / "queries.jsonl", qrels):
    if not file.exists():
      raise FileNotFoundError(f"{file} does not exist; a BEIR folder has corpus.jsonl, queries.jsonl and qrels.tsv")
  documents, queries = read_corpus(folder / "corpus.jsonl"), {}
  for number, record in read_jsonl(folder / "queries.jsonl"):
    where = f"{folder / 'queries.jsonl'}, line {number}"
    id, text = record.get("_id"), record.get("text")
    if not isinstance(id, str) or not isinstance(text, str):
      raise ValueError(f"{where}: _id and text must be strings, got {reprlib.repr([id, text])}")
    if id in queries:
      raise ValueError(f"{where}: the query id {id!r} occurs twice; ids must be unique")
    queries[id] = text
  grades = read_qrels(qrels, queries, {document.id for document in documents})
  if not grades:
    raise ValueError(f"{qrels} names no relevant document; there is nothing to evaluate")
  return Judged(documents, queries, grades).only(grades)


def read_corpus(path: epath.PathLike) -> list[Document]:
  """Read the documents of a `corpus.jsonl`. Raises ValueError, with file and line, for a line without a document."""
  documents: dict[str, Document] = {}
  for number, record in read_jsonl(path):
    id, title, text = record.get("_id"), record.get("title"), record.get("text")
    title = "" if title is None else title
    if not isinstance(id, str) or not id or not isinstance(title, str) or not isinstance(text, str):
      raise ValueError(
        f"{path}, line {number}: _id, title and text must be strings, got {reprlib.repr([id, title, text])}"
      )
    if id in documents:
      raise ValueError(f"{path}, line {number}: the id {id!r} occurs twice; ids must be unique")
    documents[id] = Document(id, title, text)
  if not documents:
    raise ValueError(f"{path} holds no document; there is nothing to search")
  return list(documents.values())


def read_qrels(path: epath.PathLike, queries: Collection[str], documents: Collection[str]) -> Qrels:
  """Read the grades above 0. Raises ValueError, with file and line, for a wrong line and for an unknown id."""
  grades: Qrels = {}
  judged: set[tuple[str, str]] = set()
  for place, (number, line) in enumerate(read_lines(path)):
    found = _judgement(line)
    if not place:
      if found is not None:
        raise ValueError(f"{path}, line {number}: {line!r} stands where the headings are expected; put them above it")
      continue
    if found is None:
      raise ValueError(
        f"{path}, line {number}: {reprlib.repr(line)} is not query-id, corpus-id and score with tabs between"
      )
    query, document, grade = found
    if (query, document) in judged:
      raise ValueError(f"{path}, line {number}: query {query!r} and document {document!r} are judged twice; keep one")
    judged.add((query, document))
    if query not in queries or document not in documents:
      unknown = f"document {document!r}" if query in queries else f"query {query!r}"
      raise ValueError(f"{path}, line {number}: there is no {unknown}; remove the line or add what it names")
    if grade > 0:
      grades.setdefault(query, {})[document] = grade
  return grades


def _judgement(line: str) -> tuple[str, str, float] | None:
  """Return the query, document and grade of a line; None if it has other columns."""
  try:
    query, document, score = line.split("\t")
    return (query, document, float(score)) if math.isfinite(float(score)) else None
  except ValueError:
    return None


@dataclasses.dataclass(frozen=True)
class TitleParts(Checked):
  """The share of a collection's titles in each part, relative to the others."""

  train: Positive = 0.5
  valid: Positive = 0.1
  test: Positive = 0.4


def deal(titles: Collection[str], parts: Mapping[str, float], seed: int = 0) -> dict[str, list[str]]:
  """Deal titles, or other names, to named parts of about the given relative sizes, in the order of the parts' names.

  So the order of a mapping, which a config may change, decides nothing. Raises ValueError for fewer titles than parts.
  """
  if len(titles) < len(parts):
    raise ValueError(f"{len(titles)} titles or names cannot be dealt to {len(parts)} parts")
  ordered = sorted(titles)
  shuffled = [ordered[i] for i in np.random.default_rng(seed).permutation(len(ordered))]
  names = sorted(parts)
  shares = np.cumsum([parts[name] for name in names])
  ends = np.clip(np.round(shares / shares[-1] * len(shuffled)).astype(int), np.arange(len(parts)) + 1, None)
  dealt = {name: shuffled[start:end] for name, start, end in zip(names, [0, *ends], ends, strict=False)}
  return {name: dealt[name] for name in parts}


def split_by_title(data: Judged, parts: Mapping[str, float], seed: int = 0) -> dict[str, Judged]:
  """Split a collection by title into named parts of about the given relative sizes; a query goes with its documents.

  All documents of a title are in one part, so no part says anything about a subject of another part. Queries whose
  documents are in several parts are left out. Raises ValueError for fewer titles than parts.
  """
  found = {}
  for name, titles in deal({document.title for document in data.documents}, parts, seed).items():
    kept = set(titles)
    documents = [document for document in data.documents if document.title in kept]
    ids = {document.id for document in documents}
    inside = [query for query, grades in data.qrels.items() if grades.keys() <= ids]
    found[name] = data._replace(documents=documents).only(inside)
  return found
