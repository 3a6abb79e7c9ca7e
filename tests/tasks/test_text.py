"""Text files become documents, documents become rows that lose no token, and mistakes are named."""

import json

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from selfrag_jax.tasks.text import HELD_OUT, PackedText, TextData, read_documents, read_passages, text_files
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
  with pytest.raises(ValueError, match=r"b\.jsonl, line 2: the field 'text' is missing"):
    list(read_documents(tmp_path))


@pytest.mark.parametrize(
  ("name", "content", "message"),
  [
    ("a.txt", b"caf\xe9", r"a\.txt(, line 1)?: .*save the file as UTF-8"),
    ("a.txt", b"version https://git-lfs.github.com/spec/v1\n", r"a\.txt is a pointer of git-lfs"),
    ("a.jsonl", b'{"text": ["a"]}', r"a\.jsonl, line 1: the field 'text'"),
    ("a.jsonl", b'{"text": "a\\ud800"}', r"a\.jsonl, line 1: .*half a surrogate pair"),
    ("a.jsonl", b'{"text": ' + b"[" * 100_000, r"a\.jsonl, line 1: nested too deeply"),
    ("a.array_record", b"no records", r"a\.array_record is damaged, or no ArrayRecord file"),
    ("a.array_record", b"", r"a\.array_record is damaged, or no ArrayRecord file"),
  ],
)
def test_damaged_files_are_named(tmp_path, name, content, message):
  (tmp_path / name).write_bytes(content)
  for read in (read_documents, lambda path: read_passages(text_files(path)[0])):
    with pytest.raises(ValueError, match=message):
      list(read(tmp_path))


def test_a_record_that_is_no_text_is_named(tmp_path):
  writer = ArrayRecordWriter(str(tmp_path / "a.array_record"), "group_size:1")
  writer.write(b"good")
  writer.write(b"\xff")
  writer.close()
  with pytest.raises(ValueError, match=r"a\.array_record, record 2: .*texts in UTF-8"):
    list(read_documents(tmp_path))


def packed(row_tokens=8, seed=0):
  texts = [f"document {i} says {'x' * (i % 13)}" for i in range(40)]
  documents = [ByteTokenizer().encode(text) for text in texts]
  return PackedText(documents, row_tokens, seed), documents


def test_rows_hold_every_token_once_an_epoch_and_know_their_documents():
  rows, documents = packed()
  flat = np.concatenate(documents).tolist()
  cut = len(flat) - len(flat) // HELD_OUT
  starts = {"train": range(0, cut - 7, 8), "valid": range(cut, len(flat) - 7, 8)}
  document_starts = set(np.cumsum([len(document) for document in documents]).tolist())
  for split, firsts in starts.items():
    batch = rows.batch(split, range(len(firsts)))
    places = {tuple(flat[first : first + 8]): first for first in firsts}
    assert {tuple(row) for row in batch["tokens"].tolist()} == places.keys()
    assert batch["mask"].all()
    # a segment ends where a document ends, and only there
    for tokens, segments in zip(batch["tokens"].tolist(), batch["segment_ids"].tolist(), strict=True):
      first = places[tuple(tokens)]
      assert segments == np.cumsum([1] + [first + t in document_starts for t in range(1, 8)]).tolist()


def test_the_order_is_a_function_of_seed_and_index():
  rows, _ = packed()
  batch = rows.batch("train", range(500, 510))["tokens"]
  np.testing.assert_array_equal(batch, packed()[0].batch("train", range(500, 510))["tokens"])
  assert (batch != packed(seed=1)[0].batch("train", range(500, 510))["tokens"]).any()
  first, second = (packed()[0].batch("train", range(*span))["tokens"].tolist() for span in ((0, 90), (90, 180)))
  assert first != second


def test_too_little_text_is_refused_with_both_numbers():
  with pytest.raises(ValueError, match=r"4 tokens are 0 rows of 8; training and validation take 20"):
    PackedText([ByteTokenizer().encode("four")], 8, 0)


def text_data(path, n_chunks=3, chunk_tokens=8):
  return TextData(str(path), ByteTokenizer(), 16, n_chunks, chunk_tokens, seed=0)


def test_a_sequence_continues_the_chunks_of_its_context(tmp_path):
  text = " ".join(f"sentence {i}" for i in range(300))
  (tmp_path / "a.txt").write_text(text)
  data = text_data(tmp_path)
  for split in ("train", "valid"):
    batch = data.contexts(split, range(5))
    assert batch.chunks.shape == (5, 3, 8)
    assert batch.inputs.shape == (5, 1, 8)
    for context, [piece] in zip(batch.chunks, batch.inputs, strict=True):
      assert data.tokenizer.decode([*context.reshape(-1), *piece]) in text
    assert (batch.gold == 2).all()
    assert (batch.query_lengths == 2).all()
  # what is held out is held out from rows of either kind
  cut = len(text) - len(text) // HELD_OUT
  seen = "".join(data.tokenizer.decode(row) for row in data.contexts("train", range(1000)).chunks.reshape(-1, 8))
  assert f"sentence {text[cut:].split()[-1]}" not in seen


def test_what_text_data_needs_is_said(tmp_path):
  with pytest.raises(ValueError, match=r"config\.data\.path is empty; give a file or a folder of texts"):
    text_data("")
  with pytest.raises(ValueError, match="need chunks of at least 4 tokens and at least one, got 2 and 3"):
    text_data(tmp_path, chunk_tokens=2)
