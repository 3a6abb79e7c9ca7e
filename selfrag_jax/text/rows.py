"""Rows of token ids for a model, encoded from texts and checked."""

import operator
from collections.abc import Sequence

from selfrag_jax.text.tokenizer import Tokenizer


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
  """Encode a text. Raises ValueError, with the place, for half a surrogate pair: somebody read bytes as text."""
  try:
    text.encode()
  except UnicodeEncodeError as error:
    raise ValueError(f"{text!a:.80} is no text in UTF-8: {error.reason} at {error.start}") from None
  return tokenizer.encode(text)


def input_rows(tokenizer: Tokenizer, inputs: Sequence[str] | Sequence[Sequence[int]], size: int) -> list[list[int]]:
  """Return texts, or lists of ids from 0 to size - 1, as ids. Raises ValueError for other or empty inputs."""
  if isinstance(inputs, str):
    raise ValueError("inputs are a list of texts or of token ids; put the text into a list")
  try:
    rows = [encode(tokenizer, row) if isinstance(row, str) else list(map(operator.index, row)) for row in inputs]
  except TypeError as error:
    raise ValueError(f"inputs are a list of texts or of lists of token ids: {error}") from None
  if not rows or not all(rows):
    raise ValueError("inputs must be at least one text or list of token ids, none of them empty")
  if wrong := [token for row in rows for token in row if not 0 <= token < size]:
    raise ValueError(f"an input has the token id {wrong[0]}; the model knows the ids from 0 to {size - 1}")
  return rows


def check_ordinary(tokenizer: Tokenizer, ids: Sequence[int]) -> None:
  """Raise ValueError for ids that no text yields: control tokens, and ids outside the vocabulary."""
  control = {i: name for name, i in tokenizer.special.items()}
  for token in ids:
    if token in control:
      raise ValueError(f"the token id {token} is the control token {control[token]}")
    if not 0 <= token < tokenizer.vocab_size:
      raise ValueError(f"the token id {token} is outside the {tokenizer.name} tokenizer's {tokenizer.vocab_size} ids")
