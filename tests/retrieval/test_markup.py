"""Markdown and HTML from real pages: the visible text is kept, and a title becomes the title."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selfrag_jax.retrieval.sources import SKIPPED_TAGS, read_source


@pytest.fixture
def read(tmp_path):
  def of(name, text):
    (tmp_path / name).write_text(text)
    [found] = read_source(name, tmp_path / name)
    return found.document

  return of


@pytest.mark.parametrize("tag", ["nav", "footer", "noscript", "template", "svg"])
def test_text_behind_a_skipped_element_that_never_ends_is_kept(read, tag):
  page = f"<p>before</p><{tag}>menu</{tag}><{tag}>links<p>The text of the page.</p>"
  assert read("a.html", page).content.split() == ["before", "links", "The", "text", "of", "the", "page."]


def test_an_element_that_ends_takes_what_is_inside_and_never_ends(read):
  assert read("a.html", "<p>one</p><nav>menu<svg>icon</nav><p>two</p>").content.split() == ["one", "two"]
  assert read("a.html", "<p>one</p><nav>menu<nav>inner</nav>more</nav><p>two</nav></p>").content.split() == [
    "one",
    "two",
  ]


def test_a_script_is_never_text(read):
  assert read("a.html", "<nav>menu<script>var x = '</nav>';</script><p>text</p>").content.split() == ["menu", "text"]
  assert read("a.html", "<p>text</p><script>var x = 1;").content == "text"


NODES = st.recursive(
  st.text("ab ", min_size=1, max_size=3).map(lambda text: (None, text)),
  lambda inner: st.tuples(st.sampled_from(["p", "b", *SKIPPED_TAGS[2:]]), st.lists(inner, max_size=3)),
  max_leaves=8,
)


def written(node):
  tag, inside = node
  return inside if tag is None else f"<{tag}>{''.join(map(written, inside))}</{tag}>"


def seen(node):
  tag, inside = node
  if tag is None:
    return inside
  return "" if tag in SKIPPED_TAGS else "".join(map(seen, inside)).join("  " if tag == "p" else ["", ""])


@settings(max_examples=100, deadline=None)
@given(st.lists(NODES, max_size=4))
def test_of_a_page_whose_elements_end_the_skipped_ones_are_left_out(tmp_path_factory, nodes):
  path = tmp_path_factory.getbasetemp() / "page.html"
  path.write_text("<p>x</p>" + "".join(map(written, nodes)))
  [found] = read_source("page.html", path)
  assert found.document.content.split() == ["x", *"".join(map(seen, nodes)).split()]


@pytest.mark.parametrize(
  ("text", "title"),
  [
    ("```sh\n# install it\npip install x\n```\n\n# Guide\ntext\n", "Guide"),
    ("~~~\n# a\n```\n# b\n~~~~\n## Guide ##\n", "Guide"),
    ("````\n```\n# a\n````\n# Guide\n", "Guide"),
    ("   ```\n# a\n  ```\n# Guide\n", "Guide"),
    ("```\n# never closed\n", "a"),
    ("``` is a fence ``` of one line\n# Guide\n", "Guide"),
    ("# Guide\n```\n# a\n```\n", "Guide"),
    ("#hashtag\n# #\n#\tGuide #1 # \n", "Guide #1"),
  ],
)
def test_a_comment_in_a_block_of_code_is_no_title(read, text, title):
  assert read("a.md", text).title == title


@pytest.mark.parametrize(
  "text", ["# " + "# " * 50_000 + "x", "---\na: b\n" + "-x: y\n" * 200 + "end\n", "---\n" + "\n" * 50_000 + "end\n"]
)
def test_hostile_markdown_does_not_take_for_ever(read, text):
  assert read("a.md", text).content.split() == text.split()
