"""Text files as training data: documents, tokenised and cut into rows; an order that is a function of the step."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
from etils import epath

from selfrag_jax.tasks.datasets import read_jsonl
from selfrag_jax.tasks.search import ShuffledEpochs
from selfrag_jax.text.tokenizer import Tokenizer

SUFFIXES = (".txt", ".jsonl", ".array_record")
HELD_OUT = 20  # one row in so many is for validation


def read_documents(path: epath.PathLike) -> Iterator[str]:
  """Yield the documents of a file, or of all files of a folder in the order of their names.

  `.txt` is one document, `.jsonl` one a line in the field `text`, `.array_record` one a record, in UTF-8.
  Raises ValueError, naming the file, for one without text or of another kind, FileNotFoundError where there is none.
  """
  root = epath.Path(path)
  files = sorted(file for file in root.iterdir() if file.suffix in SUFFIXES) if root.is_dir() else [root]
  if not files or not files[0].exists():
    raise FileNotFoundError(f"{path} holds no text; give a file or a folder of files that end in {', '.join(SUFFIXES)}")
  for file in files:
    texts = _READERS[file.suffix](file) if file.suffix in _READERS else None
    if texts is None:
      raise ValueError(f"{file} ends in {file.suffix!r}; texts end in {', '.join(SUFFIXES)}")
    n = 0
    for text in texts:
      if text.strip():
        n += 1
        yield text
    if not n:
      raise ValueError(f"{file} holds no text")


def _lines(file: epath.Path) -> Iterator[str]:
  for number, record in enumerate(read_jsonl(file), 1):
    if not isinstance(record.get("text"), str):
      raise ValueError(f"{file}, record {number}: the field 'text' is missing or no text")
    yield record["text"]


def _records(file: epath.Path) -> Iterator[str]:
  import grain

  source: Any = grain.sources.ArrayRecordDataSource(str(file))
  return (source[i].decode() for i in range(len(source)))


_READERS = {".txt": lambda file: iter([file.read_text(encoding="utf-8")]), ".jsonl": _lines, ".array_record": _records}


class PackedText:
  """Rows of `row_tokens` tokens from documents one behind the other, each a segment of its own. Rows have no padding.

  A row in twenty is held out for validation. Raises ValueError for texts of fewer rows than that takes.
  """

  def __init__(self, documents: Sequence[str] | Iterator[str], tokenizer: Tokenizer, row_tokens: int, seed: int):
    ids = [np.array(tokenizer.encode(text), np.int32) for text in documents]
    n = sum(map(len, ids)) // row_tokens
    if n < HELD_OUT:
      raise ValueError(
        f"{sum(map(len, ids))} tokens are {n} rows of {row_tokens}; training and validation take {HELD_OUT}: "
        "give more text or shorter rows"
      )
    which = np.repeat(np.arange(1, len(ids) + 1, dtype=np.int32), [len(document) for document in ids])
    rows = lambda flat: flat[: n * row_tokens].reshape(n, row_tokens)
    self._tokens, self._segment_ids = rows(np.concatenate(ids)), rows(which)
    held_out = np.arange(n) % HELD_OUT == 0
    valid = np.flatnonzero(held_out)
    # validation goes round and round, so that whole batches can be taken of few rows
    self._row = {
      "valid": lambda i: valid[i % len(valid)],
      "train": ShuffledEpochs(np.flatnonzero(~held_out).tolist(), seed).__getitem__,
    }

  def batch(self, split: Literal["train", "valid"], indices: Sequence[int] | range) -> dict[str, np.ndarray]:
    """Return rows: tokens and segment ids int32 [B, T], and which tokens are predicted, bool [B, T]."""
    at = np.array([self._row[split](index) for index in indices])
    tokens, segments = self._tokens[at], self._segment_ids[at]
    segments = segments - segments[:, :1] + 1  # small numbers, from 1 on in every row
    return {"tokens": tokens, "segment_ids": segments, "mask": np.ones_like(tokens, bool)}
