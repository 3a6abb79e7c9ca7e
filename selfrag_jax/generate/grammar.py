"""Grammars of texts: JSON by a schema, with the library llguidance (`pip install -e '.[serve]'`)."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from selfrag_jax.text.tokenizer import Tokenizer

LONGEST = 100_000  # characters of a schema
COMPACT: Any = {"whitespace_flexible": False}  # small models write blanks without end where a schema allows them


class Vocabulary:
  """The bytes of each token of a model, as grammars need them. `everything` allows all tokens."""

  def __init__(self, tokenizer: Tokenizer, size: int, end: int):
    """size: rows of the model's logits; end: the token that ends a text.

    Raises ImportError without llguidance, and ValueError for a tokenizer whose tokens are not strings of bytes.
    """
    try:
      from llguidance import LLTokenizer, TokenizerWrapper
    except ImportError:
      raise ImportError("answers by a JSON schema need llguidance: pip install 'llguidance>=1,<2'") from None
    pieces = getattr(tokenizer, "token_bytes", None)
    if pieces is None:
      raise ValueError(f"the tokens of the {tokenizer.name} tokenizer are not strings of bytes, so none fits a schema")
    tokens = [*pieces(), *[b""] * size][:size]
    special = sorted(i for i in tokenizer.special.values() if i < size)
    for name, i in tokenizer.special.items():
      if i < size:
        tokens[i] = name.encode()
    self.tokens = LLTokenizer(
      TokenizerWrapper(_Described(tokenizer, tokens, special, end)), n_vocab=size, eos_token=end
    )
    self.everything = np.full(-(-size // 32), 0xFFFFFFFF, np.uint32)


class _Described:
  """A tokenizer as llguidance asks it."""

  bos_token_id = None

  def __init__(self, tokenizer: Tokenizer, tokens: list[bytes], special: list[int], end: int):
    self._tokenizer, self.tokens, self.special_token_ids, self.eos_token_id = tokenizer, tokens, special, end

  def __call__(self, text: bytes) -> list[int]:
    return self._tokenizer.encode(text.decode(errors="replace"))


class Grammar:
  """JSON that fits a schema, token by token."""

  def __init__(self, vocabulary: Vocabulary, schema: Mapping[str, Any]):
    """Raises ValueError, with llguidance's reason, for what is no JSON schema or has features it does not know."""
    from llguidance import LLMatcher

    text = json.dumps(schema)
    if len(text) > LONGEST:
      raise ValueError(f"the schema has {len(text):,} characters; at most {LONGEST:,} are read")
    self._words = len(vocabulary.everything)
    grammar = LLMatcher.grammar_from_json_schema(text, defaults=COMPACT)
    self._matcher = LLMatcher(vocabulary.tokens, grammar, log_level=0)
    self._check("the schema cannot be followed")

  @property
  def is_done(self) -> bool:
    """Whether the text is complete and nothing may follow."""
    return self._matcher.is_stopped()

  def allowed(self) -> np.ndarray:
    """Return the tokens that may come next as bits, uint32 [V / 32]."""
    bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: self._words]
    self._check("no token can follow")
    return bits

  def accept(self, token: int) -> None:
    """Go on by a token that is allowed. Raises ValueError for another."""
    self._matcher.consume_token(token)
    self._check(f"the token {token} may not follow")

  def _check(self, what: str) -> None:
    if self._matcher.is_error():
      raise ValueError(f"{what}: {self._matcher.get_error():.300}")
