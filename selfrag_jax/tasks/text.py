"""Text files as training data: documents, tokenised and cut into rows in an order that is a function of the step."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from etils import epath

from selfrag_jax.storage.hub import locate_data
from selfrag_jax.storage.json_lines import read_jsonl, read_lines, refuse_pointer
from selfrag_jax.tasks.context_batch import ContextBatch
from selfrag_jax.tasks.facts import Demand
from selfrag_jax.tasks.search_task import Indices, ShuffledEpochs
from selfrag_jax.text.tokenizer import Tokenizer

HELD_OUT = 20  # one token in HELD_OUT is for validation


def read_documents(path: epath.PathLike) -> Iterator[str]:
  """Yield the documents of a file, or of all files of a folder (or of a name on the hub) in the order of their names.

  A `.txt` file is one document; a `.jsonl` file has one per line, in the field `text`; an `.array_record` file has one
  per record, in UTF-8. Raises ValueError, with the file's name, for a file without text or of another kind, and
  FileNotFoundError if there is no file.
  """
  for file in text_files(path):
    n = 0
    for text in _READERS[file.suffix](file):
      if text.strip():
        n += 1
        yield text
    if not n:
      raise ValueError(f"{file} holds no text")


def text_files(path: epath.PathLike) -> list[epath.Path]:
  """List the texts of a folder in the order of their names, or the file itself. Raises like `read_documents`."""
  root = locate_data(path, [f"*{suffix}" for suffix in _READERS])
  files = (
    sorted(file for file in root.iterdir() if file.suffix in _READERS and file.is_file()) if root.is_dir() else [root]
  )
  if not files or not files[0].exists():
    raise FileNotFoundError(f"{path} holds no text; give a file or a folder of files that end in {', '.join(_READERS)}")
  if (suffix := files[0].suffix) not in _READERS:
    raise ValueError(f"{path} ends in {suffix!r}; texts end in {', '.join(_READERS)}")
  for file in files:
    refuse_pointer(file)
  return files


def read_passages(file: epath.Path) -> list[tuple[int, str]]:
  """List the passages of one of the `text_files` with their numbers: lines of a `.txt` file, records of the others."""
  numbered = read_lines(file) if file.suffix == ".txt" else enumerate(_READERS[file.suffix](file), 1)
  found = [(number, text) for number, text in numbered if text.strip()]
  if not found:
    raise ValueError(f"{file} holds no text")
  return found


def _lines(file: epath.Path) -> Iterator[str]:
  for number, record in read_jsonl(file):
    if not isinstance(record.get("text"), str):
      raise ValueError(f"{file}, line {number}: the field 'text' is missing or no text")
    yield record["text"]


def _records(file: epath.Path) -> Iterator[str]:
  import grain

  try:
    source: Any = grain.sources.ArrayRecordDataSource(str(file))
    n = len(source)
  except Exception as error:  # the library has no exception type of its own for a damaged file
    raise ValueError(f"{file} is damaged, or no ArrayRecord file ({error}); write it again") from None
  for i in range(n):
    try:
      yield source[i].decode()
    except UnicodeDecodeError as error:
      raise ValueError(f"{file}, record {i + 1}: {error}; records are texts in UTF-8") from None


def _whole(file: epath.Path) -> Iterator[str]:
  try:
    yield file.read_bytes().decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
  except UnicodeDecodeError as error:
    raise ValueError(f"{file}: {error}; save the file as UTF-8") from None


_READERS = {".txt": _whole, ".jsonl": _lines, ".array_record": _records}


class PackedText:
  """Rows of `row_tokens` tokens from concatenated documents, each a segment of its own. Rows have no padding.

  The last twentieth of the tokens is held out for validation, whatever the length of the rows. Raises ValueError if
  this part is shorter than a row.
  """

  def __init__(self, documents: Sequence[Sequence[int]], row_tokens: int, seed: int):
    flat = np.concatenate([np.asarray(document, np.int32) for document in documents])
    which = np.repeat(np.arange(1, len(documents) + 1, dtype=np.int32), [len(document) for document in documents])
    cut = len(flat) - len(flat) // HELD_OUT
    if len(flat) - cut < row_tokens:
      raise ValueError(
        f"{len(flat)} tokens are {len(flat) // row_tokens} rows of {row_tokens}; training and validation take "
        f"{HELD_OUT}: give more text or shorter rows"
      )
    rows = lambda column: column[: len(column) // row_tokens * row_tokens].reshape(-1, row_tokens)
    parts = {"train": slice(cut), "valid": slice(cut, None)}
    self._rows = {split: (rows(flat[part]), rows(which[part])) for split, part in parts.items()}
    self._order = ShuffledEpochs(range(len(self._rows["train"][0])), seed)

  def batch(self, split: str, indices: Indices) -> dict[str, np.ndarray]:
    """Return rows: tokens and segment ids int32 [B, T], and the mask of predicted tokens, bool [B, T].

    Validation starts again after its last row, so that a few rows fill whole batches.
    """
    tokens, segments = self._rows[split]
    at = np.array([self._order[i] if split == "train" else i % len(tokens) for i in indices])
    tokens, segments = tokens[at], segments[at]
    segments = segments - segments[:, :1] + 1  # small numbers, from 1 on in every row
    return {"tokens": tokens, "segment_ids": segments, "mask": np.ones_like(tokens, bool)}


class TextData:
  """Text files as data for the phases of the Self-RAG memory: packed rows, and pieces of text with their contexts.

  An input is a piece of `chunk_tokens` tokens: its first quarter is the query, the rest is predicted with a memory of
  the `n_chunks` pieces before it. The gold chunk is the piece directly before.
  """

  def __init__(self, path: str, tokenizer: Tokenizer, row_tokens: int, n_chunks: int, chunk_tokens: int, seed: int):
    if not path:
      raise ValueError("config.data.path is empty; give a file or a folder of texts: --config.data.path=FOLDER")
    if chunk_tokens < 4 or n_chunks < 1:
      raise ValueError(f"need chunks of at least 4 tokens and at least one, got {chunk_tokens} and {n_chunks}")
    documents = [tokenizer.encode(text) for text in read_documents(path)]
    self.tokenizer, self.chunk_tokens, self.n_chunks = tokenizer, chunk_tokens, n_chunks
    self.rows = PackedText(documents, row_tokens, seed).batch
    self._contexts = PackedText(documents, (n_chunks + 1) * chunk_tokens, seed)

  def contexts(self, split: str, indices: Indices, _: Demand = "even") -> ContextBatch:
    """Return contexts, with the pieces that follow them as inputs; a demand does not apply to text."""
    tokens = self._contexts.batch(split, indices)["tokens"].reshape(len(indices), -1, self.chunk_tokens)
    rows, n, full = len(tokens), self.n_chunks, np.int32(self.chunk_tokens)
    return ContextBatch(
      chunks=tokens[:, :n],
      chunk_lengths=np.full((rows, n), full),
      inputs=tokens[:, n:],
      lengths=np.full((rows, 1), full),
      query_lengths=np.full((rows, 1), full // 4),
      gold=np.full((rows, 1, 1), n - 1, np.int32),
      use_memory=np.ones((rows, 1), bool),
    )
