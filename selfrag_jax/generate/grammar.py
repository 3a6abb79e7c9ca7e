"""Grammars of texts: JSON by a schema, with the library llguidance (`pip install -e '.[serve]'`)."""

import functools
import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np

from selfrag_jax.text.tokenizer import Tokenizer

T = TypeVar("T")
LONGEST = 100_000  # characters of a schema
# llguidance follows references by recursion; the stack of most threads, 8 MB, ends after about 1,000 of them
STACK = 1 << 28  # bytes of address space; what is not used takes no memory
KEPT = 8  # compiled schemas
# the texts beside one with a schema wait while its next token is looked for; errors do not tell what was written
LIMITS: Any = {"step_lexer_fuel": 50_000, "step_max_items": 20_000, "max_lexer_states": 20_000, "verbose_errors": False}
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
    self._compiled = functools.lru_cache(KEPT)(self._compile)

  def grammar(self, schema: Mapping[str, Any]) -> "Grammar":
    """Return the grammar of a JSON schema at its beginning.

    Raises ValueError, with llguidance's reason, for what is no JSON schema or has features it does not know.
    """
    try:
      text = json.dumps(schema)
    except RecursionError:
      raise ValueError("the schema is nested too deeply") from None
    if len(text) > LONGEST:
      raise ValueError(f"the schema has {len(text):,} characters; at most {LONGEST:,} are read")
    return self._compiled(text).copy()

  def _compile(self, text: str) -> "Grammar":
    from llguidance import LLMatcher, LLParserLimits

    def made() -> Grammar:
      source = LLMatcher.grammar_from_json_schema(text, defaults=COMPACT)
      matcher = LLMatcher(self.tokens, source, log_level=0, limits=LLParserLimits(**LIMITS))
      grammar = Grammar(matcher, len(self.everything))
      grammar.check("the schema cannot be followed")
      # what is beyond the limits often shows in the first token: it is said here, where no other text waits for it
      first = grammar.copy()
      bits = np.unpackbits(first.allowed().view(np.uint8), bitorder="little")
      first.accept(int(bits.argmax()))
      return grammar

    return _with_stack(made)


class _Described:
  """A tokenizer as llguidance asks it."""

  bos_token_id = None

  def __init__(self, tokenizer: Tokenizer, tokens: list[bytes], special: list[int], end: int):
    self._tokenizer, self.tokens, self.special_token_ids, self.eos_token_id = tokenizer, tokens, special, end

  def __call__(self, text: bytes) -> list[int]:
    return self._tokenizer.encode(text.decode(errors="replace"))


class Grammar:
  """JSON that fits a schema, token by token. `Vocabulary.grammar` makes one."""

  def __init__(self, matcher: Any, words: int):
    """matcher: llguidance's. words: uint32 of the bits of all tokens."""
    self._matcher, self._words = matcher, words

  def copy(self) -> "Grammar":
    """Return another one that is as far."""
    return Grammar(self._matcher.deep_copy(), self._words)

  @property
  def is_done(self) -> bool:
    """Whether the text is complete and nothing may follow."""
    return self._matcher.is_stopped()

  def allowed(self) -> np.ndarray:
    """Return the tokens that may come next as bits, uint32 [V / 32]. Raises ValueError if that is beyond the limits."""
    bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: self._words]
    self.check("no token can follow")
    return bits

  def accept(self, token: int) -> None:
    """Go on by a token that is allowed. Raises ValueError for another, or beyond the limits."""
    self._matcher.consume_token(token)
    self.check(f"the token {token} may not follow")

  def check(self, what: str) -> None:
    """Raise ValueError if it has failed."""
    if self._matcher.is_error():
      raise ValueError(f"{what}: {self._matcher.get_error():.300}")


_starting = threading.Lock()


def _with_stack(function: Callable[[], T]) -> T:
  """Call a function in a thread that has STACK bytes."""
  result: Future[T] = Future()

  def call() -> None:
    try:
      result.set_result(function())
    except BaseException as error:
      result.set_exception(error)

  with _starting:  # the size is one for the process
    before = threading.stack_size(STACK)
    try:
      threading.Thread(target=call, daemon=True).start()
    finally:
      threading.stack_size(before)
  return result.result()
