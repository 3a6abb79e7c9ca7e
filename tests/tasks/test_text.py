"""Text files become documents, documents become rows that lose no token, and mistakes are named."""

import json

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from selfrag_jax.tasks.text import HELD_OUT, PackedText, read_documents
from selfrag_jax.text.tokenizer import ByteTokenizer

TEXTS = ["one two\nthree", "four", "fünf"]


def write_records(path, texts):
  writer = ArrayRecordWriter(str(path), "group_size:1")
  for text in texts:
    writer.write(text.encode())
  writer.close()


def test_every_kind_of_file_is_read(tmp_path):
  (tmp_path / "a.txt").write_text(TEXTS[0], encoding="utf-8")
  (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[1:]))
  write_records(tmp_path / "c.array_record", [*TEXTS, " "])
  (tmp_path / "notes.md").write_text("no text of ours")
  assert list(read_documents(tmp_path)) == [*TEXTS, *TEXTS]  # a blank one says nothing
  assert list(read_documents(tmp_path / "b.jsonl")) == TEXTS[1:]


def test_what_is_no_text_is_named(tmp_path):
  with pytest.raises(FileNotFoundError, match="holds no text; give a file or a folder"):
    list(read_documents(tmp_path))
  with pytest.raises(FileNotFoundError, match=r"nowhere\.txt holds no text"):
    list(read_documents(tmp_path / "nowhere.txt"))
  (tmp_path / "a.csv").write_text("a,b")
  with pytest.raises(ValueError, match=r"a\.csv ends in '\.csv'; texts end in \.txt"):
    list(read_documents(tmp_path / "a.csv"))
  (tmp_path / "empty.txt").write_text(" \n")
  with pytest.raises(ValueError, match=r"empty\.txt holds no text"):
    list(read_documents(tmp_path))
  (tmp_path / "empty.txt").unlink()
  (tmp_path / "b.jsonl").write_text('{"text": "good"}\n{"txt": "bad"}\n')
  with pytest.raises(ValueError, match=r"b\.jsonl, record 2: the field 'text' is missing"):
    list(read_documents(tmp_path))


def packed(row_tokens=8, seed=0):
  tokenizer = ByteTokenizer()
  texts = [f"document {i} says {'x' * (i % 13)}" for i in range(40)]
  return PackedText(iter(texts), tokenizer, row_tokens, seed), [tokenizer.encode(text) for text in texts]


def test_rows_hold_every_token_once_an_epoch_and_know_their_documents():
  rows, documents = packed()
  n = sum(map(len, documents)) // 8
  n_valid = -(-n // HELD_OUT)
  valid, train = rows.batch("valid", range(n_valid)), rows.batch("train", range(n - n_valid))
  whole = {tuple(row) for part in (valid, train) for row in part["tokens"].tolist()}
  flat = np.concatenate(documents).tolist()[: n * 8]
  assert whole == {tuple(flat[i : i + 8]) for i in range(0, n * 8, 8)}
  assert train["mask"].all()
  # a segment ends where a document ends, and only there
  ends = {tuple(flat[i : i + 8]): i for i in range(0, n * 8, 8)}
  starts = set(np.cumsum([len(document) for document in documents]).tolist())
  for tokens, segments in zip(train["tokens"].tolist(), train["segment_ids"].tolist(), strict=True):
    first = ends[tuple(tokens)]
    expected = np.cumsum([1] + [first + t in starts for t in range(1, 8)])
    assert segments == expected.tolist()


def test_the_order_is_a_function_of_seed_and_index():
  rows, _ = packed()
  batch = rows.batch("train", range(500, 510))["tokens"]
  np.testing.assert_array_equal(batch, packed()[0].batch("train", range(500, 510))["tokens"])
  assert (batch != packed(seed=1)[0].batch("train", range(500, 510))["tokens"]).any()
  first, second = (packed()[0].batch("train", range(*span))["tokens"].tolist() for span in ((0, 90), (90, 180)))
  assert first != second


def test_too_little_text_is_refused_with_both_numbers():
  with pytest.raises(ValueError, match=r"4 tokens are 0 rows of 8; training and validation take 20"):
    PackedText(["four"], ByteTokenizer(), 8, 0)
