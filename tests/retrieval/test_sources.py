"""Sources of documents: files of any layout are read, and a bad record is named by file and line."""

import json
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from selfrag_jax.retrieval.document import Document
from selfrag_jax.retrieval.sources import clean, read_source
from selfrag_jax.storage.json_lines import LONGEST_LINE


def read(path, **options):
  return [found.document for found in read_source(path.name, path, **options)]


def write_lines(path, *records):
  path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
  return path


def test_lines_of_all_layouts(tmp_path):
  path = write_lines(
    tmp_path / "all.jsonl",
    {"id": "ours", "title": "T", "content": "C", "metadata": {"year": 2020}, "source": "atlas", "score": 0.5},
    {"_id": "beir", "title": "T", "text": "C", "metadata": {}},
    {"id": 7, "contents": '"Flash title"\nThe body.\nIts second line.'},
    {"wikipedia_id": "12", "wikipedia_title": "Kilt", "text": ["Kilt\n", "First.\n", "Second.\n"], "history": {"a": 1}},
    {"text": "nothing but text"},
  )
  ours, beir, flash, kilt, bare = read(path)
  assert (ours.id, ours.title, ours.content, ours.source, ours.score) == ("ours", "T", "C", "atlas", None)
  assert dict(ours.metadata) == {"year": 2020}
  assert (beir.id, beir.title, beir.content, beir.source) == ("beir", "T", "C", "all.jsonl")
  assert (flash.id, flash.title, flash.content) == ("7", "Flash title", "The body.\nIts second line.")
  assert (kilt.id, kilt.title, kilt.content) == ("12", "Kilt", "Kilt\nFirst.\nSecond.")
  assert dict(kilt.metadata) == {"history": {"a": 1}}
  assert (bare.id, bare.title, bare.content) == ("all.jsonl:5", "", "nothing but text")


def test_files_are_documents(tmp_path):
  (tmp_path / "a.txt").write_bytes("\ufeffplain\r\ntext é".encode())
  (tmp_path / "b.md").write_text("---\ndate: 1\n---\nIntro.\n\n## Ports #\nCadiz\n")
  (tmp_path / "c.html").write_text(
    "<html><head><title>A &amp; B</title><style>p{}</style></head><body><nav>menu</nav><p>One<br>two &lt;three&gt;</p>"
    "<script>var x = '<p>no</p>';</script><ul><li>x</li><li>y</li></ul></body></html>"
  )
  [text], [markdown], [html] = (read(tmp_path / name) for name in ("a.txt", "b.md", "c.html"))
  assert (text.id, text.title, text.content, text.source) == ("a.txt", "a", "plain\ntext é", "a.txt")
  assert (markdown.title, markdown.content) == ("Ports", "Intro.\n\n## Ports #\nCadiz")
  assert html.title == "A & B"
  assert html.content.split() == ["One", "two", "<three>", "x", "y"]
  assert "One\ntwo" in html.content


def test_cells_of_tables_stay_apart_and_the_first_title_counts(tmp_path):
  (tmp_path / "a.html").write_text(
    "<title>Page</title><svg><title>Close</title></svg><table><tr><td>Alice</td><td>42</td></tr></table>"
  )
  [html] = read(tmp_path / "a.html")
  assert (html.title, html.content) == ("Page", "Alice 42")


def test_a_byte_order_mark_is_no_part_of_a_line(tmp_path):
  (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"id": "1", "text": "x"}\n')
  assert [document.id for document in read(tmp_path / "a.jsonl")] == ["1"]


def test_cleaning_keeps_words_and_paragraphs():
  assert clean("a\u0000b\u0007  c\t d \r\n\r\n\r\n\r\n e\u0301") == "ab c d\n\n\u00e9"
  assert clean("x\u2028y\u00a0z") == "x y z"
  assert clean(" \n ") == ""


@pytest.mark.parametrize(
  ("name", "data", "message"),
  [
    ("a.jsonl", b'{"text": "fine"}\n{"text": ', r"a\.jsonl, line 2: "),
    ("a.jsonl", b'{"text": "fine"}\n\n{"title": "t"}', r"a\.jsonl, line 3: no text: one of content, text"),
    ("a.jsonl", b'{"text": "  "}', r"a\.jsonl, line 1: document 'a\.jsonl:1' is empty"),
    ("a.jsonl", b'{"id": [1], "text": "x"}', r"a\.jsonl, line 1: id is \[1\], it must be a text"),
    ("a.jsonl", b'{"text": 3}', r"a\.jsonl, line 1: text is 3, it must be a text"),
    ("a.jsonl", b'{"text": "x", "metadata": 3}', r"a\.jsonl, line 1: metadata is 3"),
    ("a.jsonl", b'{"text": "\xff"}', r"a\.jsonl, line 1: .*save the file as UTF-8"),
    ("a.txt", b"one\ntwo \xff", r"a\.txt, line 2: .*save the file as UTF-8"),
    ("a.txt", b"\x7fELF\x00\x01", r"a\.txt is no text: it has zero bytes"),
    ("a.md", b" \n", r"a\.md is empty"),
    ("a.html", b"<p> </p>", r"a\.html is empty"),
    ("a.html", b"<p>x</p><![foo[x]]>", r"a\.html is no HTML that can be read"),
    ("a.jsonl", b'{"text": "x"}{', r"a\.jsonl, line 1: .*each line must be one JSON object"),
    ("a.jsonl", b'[1]\n{"text": "fine"}', r"a\.jsonl, line 1: a JSON object was expected, not list"),
    ("a.jsonl", b'{"id": "\\ud800", "text": "x"}\n{"text": "fine"}', r"a\.jsonl, line 1: .*half a surrogate pair"),
    ("a.jsonl", b'{"text": "x", "by": ["\\ud800"]}', r"a\.jsonl, line 1: .*half a surrogate pair"),
  ],
)
def test_what_is_no_document_is_named_or_left_out(tmp_path, name, data, message):
  path = tmp_path / name
  path.write_bytes(data)
  with pytest.raises(ValueError, match=message):
    read(path)
  errors = []
  kept = read(path, failed=errors.append)
  assert len(errors) == 1
  assert len(kept) == (data.count(b"fine"))


def test_a_line_of_many_megabytes_is_named(tmp_path):
  path = tmp_path / "huge.jsonl"
  path.write_bytes(b'{"text": "fine"}\n{"text": "' + b"x" * (50 << 20) + b'"}\n')
  assert LONGEST_LINE < 50 << 20
  with pytest.raises(ValueError, match=r"huge\.jsonl, line 2: longer than 32 MiB"):
    read(path)
  with path.open("ab") as file:
    file.write(b'{"text": "behind"}\n')
  errors = []
  assert [document.content for document in read(path, failed=errors.append)] == ["fine", "behind"]
  assert len(errors) == 1


@pytest.mark.parametrize(
  ("line", "message"),
  [
    (b"[" * 100_000, "nested too deep"),
    (b'{"text": "x", "by": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deep"),
    (b'{"text": "x", "by": ' + b'{"a":' * 300 + b"1" + b"}" * 300 + b"}", "nested more than 50 deep"),
    (b'{"text": "x", "by": NaN}', "not JSON compliant"),
    (b'{"text": "x", "metadata": {"by": [-1e999]}}', "not JSON compliant"),
    (b'{"text": "x", "by": ' + b"7" * 5000 + b"}", "4300 digits"),
    (b'{"id": true, "text": "x"}', "id is true, it must be a text"),
    (b'{"id": null, "text": "x"}', "id is null, it must be a text"),
  ],
)
def test_absurd_lines_are_named_or_left_out(tmp_path, line, message):
  path = tmp_path / "a.jsonl"
  path.write_bytes(b'{"text": "fine"}\n' + line + b'\n{"text": "fine"}\n')
  with pytest.raises(ValueError, match=rf"a\.jsonl, line 2: .*{message}"):
    read(path)
  errors = []
  assert len(read(path, failed=errors.append)) == 2
  assert len(errors) == 1


VALUES = st.recursive(
  st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=[])),
  lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
  max_leaves=8,
)
NAMES = st.sampled_from(["id", "_id", "title", "text", "content", "contents", "metadata", "source", "score", "year"])
LINES = st.binary(max_size=60) | st.dictionaries(NAMES | st.text(max_size=3), VALUES, max_size=6).map(
  lambda record: json.dumps({"text": "some text", **record}).encode()
)


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(LINES)
def test_any_line_is_a_document_or_an_error_with_file_and_line(tmp_path, line):
  path, errors = tmp_path / "a.jsonl", []
  path.write_bytes(line)
  for document in read(path, failed=errors.append):
    kept = json.loads(json.dumps(document.to_dict(), ensure_ascii=False, allow_nan=False).encode())
    assert Document.from_dict(kept) == document
  assert all(re.match(rf"{re.escape(str(path))}, line [0-9]+: .", str(error)) for error in errors)


def test_front_matter_has_names_and_a_text_between_two_rules_is_text(tmp_path):
  (tmp_path / "rule.md").write_text("---\nThe treasure lies under the oak.\n---\nMore text.\n")
  (tmp_path / "front.md").write_text("---\ntitle: A\ntags:\n  - x\n\n---\nThe text.\n")
  assert "treasure" in read(tmp_path / "rule.md")[0].content
  assert read(tmp_path / "front.md")[0].content == "The text."
