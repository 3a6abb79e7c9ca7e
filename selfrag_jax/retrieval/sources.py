"""Readers that turn files into documents: JSON lines of several layouts, plain text, Markdown and HTML.

Invalid contents raise ValueError with file and line. A line of `.jsonl` is one of

  {id, title, content, metadata, source}             ours
  {_id, title, text, metadata}                       BEIR
  {id, contents}                                     FlashRAG: the first line of `contents` is the title
  {wikipedia_id or _id, wikipedia_title, text: [paragraph, …]}      KILT

Only the text is required, and fields of other names become metadata. A line without a title or source takes them from
its metadata. Every other file is one document, whose id is the path.
"""

import json
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

from selfrag_jax.retrieval.document import DEEPEST, Document, is_deeper, is_utf8
from selfrag_jax.storage.json_lines import parse_object, raise_error, read_lines

IDS = ("id", "_id", "wikipedia_id", "docid")
TITLES = ("title", "wikipedia_title")
TEXTS = ("content", "text", "contents", "passage")
CODE_TAGS = ("script", "style")  # their contents are never text, even if the closing tag is missing
SKIPPED_TAGS = (*CODE_TAGS, "noscript", "template", "svg", "nav", "footer")
BLANK_TAGS = ("td", "th", "button", "option", "label")  # replaced by a space, so that words stay apart
BREAKING_TAGS = {
  *("p", "div", "br", "li", "ul", "ol", "tr", "table", "section", "article", "header", "main", "blockquote", "pre"),
  *("h1", "h2", "h3", "h4", "h5", "h6", "dt", "dd", "hr", "figure", "figcaption", "caption"),
}

_NAMED = re.compile(r"[\w.-]+ ?:")
_HEADING = re.compile(r"#{1,6}[ \t]+(.*)")
_FENCE = re.compile(r" {0,3}(`{3,}(?=[^`]*$)|~{3,})")
_BLANKS, _LINES = re.compile(r"[^\S\n]+"), re.compile(r" ?\n ?")


class NotTextError(ValueError):
  """A file cannot be read as text: it is binary, in another encoding than UTF-8, or cannot be parsed."""


class Found(NamedTuple):
  """A document, and the place where it was found: `FILE, line N`, or `FILE`."""

  document: Document
  place: str


def read_source(name: str, path: Path, failed: Callable[[ValueError], None] | None = None) -> Iterator[Found]:
  """Yield the cleaned documents of a file; the `source` of a document without one is the file's name.

  Raises ValueError, with file and line, for a line or file that is no document or has no text, and NotTextError for a
  file that is not text at all. If `failed` is given, it is called with the error instead, and the next line is read.
  """
  yield from READERS[path.suffix.lower()](name, path, failed or raise_error)


def clean(text: str) -> str:
  """Return text in NFC without control characters, with single spaces, and one empty line between paragraphs."""
  text = unicodedata.normalize("NFC", text.replace("\r\n", "\n").replace("\r", "\n"))
  kept = "".join(c for c in text if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cs", "Co"))
  kept = _LINES.sub("\n", _BLANKS.sub(" ", kept))
  return re.sub(r"\n{3,}", "\n\n", kept).strip()


def _jsonl(name: str, path: Path, failed: Callable[[ValueError], None]) -> Iterator[Found]:
  for number, line in read_lines(path, failed):
    place = f"{path}, line {number}"
    try:
      record = parse_object(line.removeprefix("\ufeff"))
      yield Found(_document(record, f"{name}:{number}", name), place)
    except ValueError as error:
      failed(ValueError(f"{place}: {error}"))


def _document(record: Mapping[str, Any], default_id: str, source: str) -> Document:
  """Make a document from the object of a line. Raises ValueError for a field that is missing or of another type."""
  rest = dict(record)
  id = next((rest.pop(field) for field in IDS if field in rest), default_id)
  title = next((rest.pop(field) for field in TITLES if rest.get(field) is not None), "")
  named = next((field for field in TEXTS if field in rest), None)
  if named is None:
    raise ValueError(f"no text: one of {', '.join(TEXTS)} is needed, there are {', '.join(sorted(record))[:200]}")
  text = rest.pop(named)
  if isinstance(text, list) and all(isinstance(part, str) for part in text):
    text = "\n".join(part.strip() for part in text)
  if named == "contents" and not title and isinstance(text, str) and "\n" in text:
    title, text = text.split("\n", 1)
    title = title.strip().removeprefix('"').removesuffix('"')
  if isinstance(id, int) and not isinstance(id, bool):
    id = str(id)
  for field, value in (("id", id), ("title", title), (named, text)):
    if not isinstance(value, str):
      raise ValueError(f"{field} is {json.dumps(value)[:60]}, it must be a text")
  if not (text := clean(str(text))):
    raise ValueError(f"document {id!r} is empty; leave the line out")
  given = rest.pop("metadata", None)
  if given is not None and not isinstance(given, dict):
    raise ValueError(f"metadata is {json.dumps(given)[:60]}, it must be an object")
  named_inside = {name: value for name in ("title", "source") if isinstance(value := (given or {}).get(name), str)}
  title = title or named_inside.get("title", "")
  source = rest.pop("source", None) or named_inside.get("source") or source
  if is_deeper([rest, given], DEEPEST):
    raise ValueError(f"metadata is nested more than {DEEPEST} deep; leave that out")
  if not is_utf8(json.dumps([id, source, rest, given], ensure_ascii=False, allow_nan=False)):
    raise ValueError("id, source or metadata have half a surrogate pair, which UTF-8 cannot hold")
  rest.pop("score", None)  # a saved search result has a score
  return Document(str(id), clean(title), text, {**rest, **(given or {})}, source=source)


def _whole(read: Callable[[str, str], tuple[str, str]]) -> Callable[..., Iterator[Found]]:
  """Return a reader of files with one document each; `read` maps the name and text of a file to title and content."""

  def reader(name: str, path: Path, failed: Callable[[ValueError], None]) -> Iterator[Found]:
    try:
      data = path.read_bytes()
      if b"\0" in data:
        raise NotTextError(f"{path} is no text: it has zero bytes, as binary files do")
      try:
        text = data.decode("utf-8-sig")
      except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise NotTextError(f"{path}, line {line}: {error}; save the file as UTF-8") from None
      title, content = read(name, text)
      if not (content := clean(content)):
        raise ValueError(f"{path} is empty; leave it out")
      yield Found(Document(name, clean(title), content, source=name), str(path))
    except ValueError as error:
      failed(error)

  return reader


def _text(name: str, text: str) -> tuple[str, str]:
  return Path(name).stem, text


def _markdown(name: str, text: str) -> tuple[str, str]:
  lines = text.replace("\r\n", "\n").split("\n")
  lines = lines[_front_matter(lines) :]
  return _first_heading(lines) or Path(name).stem, "\n".join(lines)


def _front_matter(lines: list[str]) -> int:
  """Return the number of lines of a file's front matter: names with values, and indented lines, between two rules.

  The lines are matched one by one: one pattern for all lines took for ever on a hostile text.
  """
  first = next((line for line in lines[1:] if line.strip()), "")
  if lines[0] != "---" or not _NAMED.match(first.lstrip()):
    return 0
  for number, line in enumerate(lines[1:-1], 1):
    if line == "---":
      return number + 1
    if line and line[0] not in " \t#-" and not _NAMED.match(line):
      return 0
  return 0


def _first_heading(lines: list[str]) -> str:
  """Return the first heading outside of code blocks, where a line with # is a comment; "" if there is none."""
  fence = ""
  for line in lines:
    mark = _FENCE.match(line)
    if fence:  # a line of at least as many marks and nothing else ends a block; so does the end of the file
      if mark and mark[1].startswith(fence) and not line.strip().strip(fence[0]):
        fence = ""
    elif mark:
      fence = mark[1]
    elif (heading := _HEADING.match(line)) and (title := heading[1].rstrip(" \t#")):
      return title
  return ""


def _html(name: str, text: str) -> tuple[str, str]:
  parser = _Text()
  try:
    parser.feed(text)
    parser.close()
  except AssertionError as error:  # html.parser raises it for an unknown declaration
    raise NotTextError(f"{name} is no HTML that can be read: {error}") from None
  return "".join(parser.title).strip() or Path(name).stem, "".join(parser.parts)


class _Text(HTMLParser):
  """A parser that collects the visible text of a page, and its title.

  The contents of a skipped element are removed when it ends: an element that is never closed would hide the whole page.
  """

  def __init__(self) -> None:
    super().__init__()
    self.parts: list[str] = []
    self.title: list[str] = []
    self._open: dict[str, list[int]] = {tag: [] for tag in SKIPPED_TAGS}  # where in `parts` open elements begin
    self._in_title = False

  def handle_starttag(self, tag: str, attrs: Any) -> None:
    self._in_title |= tag == "title" and not self.title and not any(self._open.values())
    if tag in self._open:
      self._open[tag].append(len(self.parts))
      self.parts.append("")  # so that no two elements begin at one place
    if tag in BREAKING_TAGS:
      self.parts.append("\n\n" if tag[0] in "ph" else "\n")
    elif tag in BLANK_TAGS:
      self.parts.append(" ")

  def handle_endtag(self, tag: str) -> None:
    self._in_title &= tag != "title"
    if self._open.get(tag):
      del self.parts[self._open[tag][-1] :]
      for begun in self._open.values():  # elements inside are removed too, whether they ended or not
        while begun and begun[-1] >= len(self.parts):
          begun.pop()
    if tag in BREAKING_TAGS:
      self.parts.append("\n")

  def handle_data(self, data: str) -> None:
    if self._in_title:
      self.title.append(data)
    elif not any(self._open[tag] for tag in CODE_TAGS):
      self.parts.append(data)


READERS: Mapping[str, Callable[..., Iterator[Found]]] = {
  ".jsonl": _jsonl,
  ".txt": _whole(_text),
  ".md": _whole(_markdown),
  ".markdown": _whole(_markdown),
  ".html": _whole(_html),
  ".htm": _whole(_html),
}
