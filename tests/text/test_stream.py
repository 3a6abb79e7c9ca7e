"""Text that grows token by token is the text of all tokens, up to the first stop string."""

from hypothesis import given
from hypothesis import strategies as st

from selfrag_jax.text.stream import TextStream
from selfrag_jax.text.tokenizer import ByteTokenizer, WordTokenizer

BYTES = ByteTokenizer()
WORDS = WordTokenizer(["don", "'", "t", "stop", ",", "now", ".", '"'])


def streamed(tokenizer, ids, stop=()):
  stream = TextStream(tokenizer, stop)
  return [*(stream.add(i) for i in ids), stream.end()], stream


@given(st.text())
def test_pieces_join_to_the_text(text):
  pieces, _ = streamed(BYTES, BYTES.encode(text))
  assert "".join(pieces) == BYTES.decode(BYTES.encode(text))


@given(st.lists(st.integers(0, BYTES.vocab_size - 1)))
def test_bytes_that_are_no_text_and_control_tokens_join_as_they_decode(ids):
  pieces, _ = streamed(BYTES, ids)
  assert "".join(pieces) == BYTES.decode(ids, skip_special=True)


@given(st.lists(st.integers(0, WORDS.vocab_size - 1)))
def test_words_join_with_the_spaces_of_the_whole_text(ids):
  pieces, _ = streamed(WORDS, ids)
  assert "".join(pieces) == WORDS.decode(ids, skip_special=True)


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_the_first_stop_string_ends_the_text_and_no_part_of_one_is_shown(text, stops):
  pieces, stream = streamed(BYTES, BYTES.encode(text), stops)
  prefixes = (text[:n] for n in range(len(text) + 1))
  ends = next((found for part in prefixes if (found := [part.find(stop) for stop in stops if stop in part])), [])
  assert stream.stopped == bool(ends)
  assert "".join(pieces) == (text[: min(ends)] if ends else text)


def test_a_character_comes_when_its_last_byte_has_come():
  pieces, _ = streamed(BYTES, BYTES.encode("a🙂b"))
  assert pieces == ["a", "", "", "", "🙂", "b", ""]
