"""The reading and chunking of files for a knowledge base, shared by builds and additions."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

from tqdm import tqdm

from selfrag_jax.retrieval.base import BaseRetriever
from selfrag_jax.retrieval.dense import DenseRetriever
from selfrag_jax.retrieval.document import FILE, PART, Document, without_origin
from selfrag_jax.retrieval.duplicates import Duplicates
from selfrag_jax.retrieval.listing import LeftOut, Source, read_file
from selfrag_jax.text.chunking import Method, chunk, count_words

Count = Callable[[Sequence[str]], Sequence[int]]


@dataclasses.dataclass(frozen=True)
class Chunking:
  """Settings that cut documents into chunks of at most `size` words or encoder tokens; `size` 0 leaves them whole."""

  size: int = 180  # all-MiniLM-L6-v2 reads about 190 words
  overlap: int = 0
  method: Method = "recursive"
  unit: Literal["word", "token"] = "word"

  def __post_init__(self):
    """Raises ValueError for an unknown unit or method, and for sizes that do not fit."""
    if self.unit not in ("word", "token"):
      raise ValueError(f"the unit of chunks is {self.unit!r}; one of word, token")
    chunk("", self.size or self.overlap + 1, self.overlap, method=self.method)


def read_chunks(
  sources: Mapping[str, Source],
  left_out: LeftOut,
  chunking: Chunking,
  retriever: BaseRetriever,
  places: dict[str, str],
  *,
  duplicates: Duplicates | None = None,
  progress: bool = True,
) -> tuple[list[Document], Counter[str]]:
  """Read files; return the chunks that are no duplicates, and the numbers of files, documents, chunks and duplicates.

  `places` maps each taken id to the place where it was found; the ids found here are added to it. Raises like
  `read_source` and `length_counter`, and ValueError for an id that is taken.
  """
  count = length_counter(chunking, retriever)
  counts, kept = Counter({"files": len(sources), "read": 0, "chunks": 0, "duplicates": 0}), []
  with tqdm(unit="doc", desc="reading", disable=not progress, mininterval=0.5) as bar:
    for name, source in sources.items():
      for found in read_file(name, source, left_out):
        chunks = list(_cut(found.document, name, chunking, count))
        ids = dict.fromkeys([found.document.id, *(document.id for document in chunks)])
        if taken := next((id for id in ids if id in places), None):
          left_out.add(ValueError(f"{found.place}: the id {taken!r} is that of {places[taken]}; ids must be unique"))
          continue
        places |= dict.fromkeys(ids, found.place)
        counts["read"] += 1
        bar.update()
        for document in chunks:
          counts["chunks"] += 1
          if duplicates is None or duplicates.first(document.id, document.text) is None:
            kept.append(document)
          else:
            counts["duplicates"] += 1
  return kept, counts


def _cut(document: Document, name: str, chunking: Chunking, count: Count) -> Iterator[Document]:
  document = without_origin(document)
  metadata = {**document.metadata, FILE: name}
  spans = []
  if chunking.size:
    spans = chunk(document.content, chunking.size, chunking.overlap, method=chunking.method, count=count)
  if len(spans) < 2:
    yield dataclasses.replace(document, metadata=metadata)
    return
  for number, span in enumerate(spans):
    yield dataclasses.replace(
      document,
      id=f"{document.id}#{number}",
      content=document.content[span.start : span.end].strip(),
      metadata={**metadata, PART: number},
    )


def dense_parts(retriever: BaseRetriever) -> list[DenseRetriever]:
  """Return the dense retrievers among a retriever and its parts."""
  own = [retriever] if isinstance(retriever, DenseRetriever) else []
  return own + [found for part in retriever.parts for found in dense_parts(part)]


def length_counter(chunking: Chunking, retriever: BaseRetriever) -> Count:
  """Return the function that measures texts in `chunking.unit`.

  Raises ValueError if the unit is the token and no encoder of the retriever has a tokenizer.
  """
  if chunking.unit == "word" or not chunking.size:
    return count_words
  for part in dense_parts(retriever):
    if part.encoder.count_tokens is not None:
      return part.encoder.count_tokens
  raise ValueError("chunks are counted in tokens of the encoder, and this retriever has none: count words")
