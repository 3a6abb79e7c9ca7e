"""Printable text: control characters for a terminal are spelled out; all ordinary text stays."""

import sys
import unicodedata

from selfrag_jax.text.printable import printable


def test_no_control_character_is_left():
  everything = "".join(map(chr, range(sys.maxunicode + 1)))
  shown = printable(everything)
  assert not {unicodedata.category(c) for c in shown} & {"Cc", "Cs", "Zl", "Zp"}
  assert printable("\x1b[31m\x9b2J\r\x07\u202ethe end\ud800") == r"\x1b[31m\x9b2J\r\x07\u202ethe end\ud800"


def test_text_stays_as_it_is():
  for text in ("plain", "Grüße, 日本\u3000語, שלום, 👩\u200d👩\u200d👧", "a\xa0b \\x1b", ""):
    assert printable(text) == text
  assert printable("two\nlines\t.\r", keep="\n\t") == "two\nlines\t.\\r"
  assert printable("two\nlines") == r"two\nlines"
