"""Tokenizers that never parse text for control tokens.

`encode` yields ordinary ids whatever the text says; special ids are reached by name through `special`, and only
`chat.py` and the rollouts put them into a sequence. So a document cannot close its own retrieval block, and a user
cannot speak as the system.
"""

import contextlib
import hashlib
import json
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Protocol

from etils import epath

from selfrag_jax.storage.json_lines import read_json_object
from selfrag_jax.text.special import SPECIAL_TOKENS

_WORD_OR_MARK = re.compile(r"\w+|[^\w\s]")
_CONTRACTED = "(?:t|s|re|ve|ll|d|m)"  # after an apostrophe
_HALVES = re.compile("[\ud800-\udfff]")  # of surrogate pairs
MAX_UNUSED_IDS = 1 << 20  # real vocabularies have gaps; every id is a row of the embedding
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_DIGITS = {"type": "Digits", "individual_digits": True}


class Tokenizer(Protocol):
  """The protocol of a tokenizer.

  name: a short name for messages. vocab_size: ids are `0 <= id < vocab_size` (a model may pad its embedding further).
  special: name -> id for all `SPECIAL_TOKENS` and the base model's own control tokens. fingerprint: sha256 over
  everything that defines the ids; checkpoints store it.
  """

  name: str
  vocab_size: int
  special: Mapping[str, int]
  fingerprint: str

  def encode(self, text: str) -> list[int]:
    """Encode text as ordinary ids, never a special one; half a surrogate pair is read as U+FFFD."""
    ...

  def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
    """Decode ids; special ids become their names, or nothing. Raises ValueError for an id outside the vocabulary."""
    ...


class WordTokenizer:
  """Give every word and punctuation mark of a closed list one id, after the special tokens (so pad is 0).

  Raises ValueError for a listed word that is not one piece (`\\w+` or a single mark) or is listed twice.
  """

  name = "word"

  def __init__(self, words: Sequence[str]):
    self.special: Mapping[str, int] = {token: i for i, token in enumerate(SPECIAL_TOKENS)}
    for word in words:
      if not _WORD_OR_MARK.fullmatch(word):
        raise ValueError(f"{word!r} is not one word or punctuation mark; list its pieces {_WORD_OR_MARK.findall(word)}")
    self._pieces = (*SPECIAL_TOKENS, *words)
    self._ids = {word: i for i, word in enumerate(words, len(SPECIAL_TOKENS))}
    if len(self._ids) < len(words):
      raise ValueError(f"{len(words)} words are listed, {len(self._ids)} are different: remove the repetitions")
    self.vocab_size = len(self._pieces)
    self.fingerprint = fingerprint(self.name, self._pieces)

  def encode(self, text: str) -> list[int]:
    """Encode text piece by piece; white space only separates. Raises ValueError that names an unknown word."""
    try:
      return [self._ids[piece] for piece in _WORD_OR_MARK.findall(text)]
    except KeyError as error:
      raise ValueError(f"the word {error} is not among the {len(self._ids)} of the vocabulary; add it") from None

  def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
    """Decode ids with a space between pieces, none before `.,?!:;` and within contractions such as don't."""
    first = len(SPECIAL_TOKENS) if skip_special else 0
    text = " ".join(self._pieces[i] for i in checked_ids(ids, self.vocab_size) if i >= first)
    return re.sub(rf"(?<=\w) ' (?={_CONTRACTED}\b)", "'", re.sub(r" (?=[.,?!:;])", "", text))


class ByteTokenizer:
  """Give every UTF-8 byte one id, after the special tokens (so pad is 0)."""

  name = "byte"

  def __init__(self):
    self.special: Mapping[str, int] = {token: i for i, token in enumerate(SPECIAL_TOKENS)}
    self.vocab_size = len(SPECIAL_TOKENS) + 256
    self.fingerprint = fingerprint(self.name, SPECIAL_TOKENS)

  def encode(self, text: str) -> list[int]:
    """Encode text as its UTF-8 bytes."""
    return [len(SPECIAL_TOKENS) + byte for byte in well_formed(text).encode()]

  def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
    """Decode ids; bytes that are not UTF-8 become U+FFFD."""
    return decode_runs(checked_ids(ids, self.vocab_size), self.special, skip_special, self._decode_bytes)

  def token_bytes(self) -> list[bytes]:
    """Return the bytes of each ordinary token by its id; control tokens have none."""
    return [b""] * len(SPECIAL_TOKENS) + [bytes([byte]) for byte in range(256)]

  def _decode_bytes(self, ids: Sequence[int]) -> str:
    return bytes(i - len(SPECIAL_TOKENS) for i in ids).decode(errors="replace")


class BPETokenizer:
  """Run a pretrained byte-level BPE in the Rust library `tokenizers`, without its control tokens.

  Ids: the base vocabulary unchanged, then the `SPECIAL_TOKENS` that are not among its control tokens, then the bytes
  that it lacks (21 in SmolLM2), so that no text is lost. Build one with `from_folder` or `from_pieces`.
  """

  name = "bpe"

  def __init__(
    self,
    vocab: Mapping[str, int],
    merges: Iterable[tuple[str, str]],
    control: Mapping[str, int],
    *,
    pre_tokenizer: Mapping[str, Any],
    normalizer: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
  ):
    from tokenizers import Tokenizer as RustTokenizer
    from tokenizers.pre_tokenizers import ByteLevel

    largest = max((*vocab.values(), *control.values()), default=-1)
    if largest - len(vocab) - len(control) > MAX_UNUSED_IDS or min((*vocab.values(), *control.values()), default=0) < 0:
      raise ValueError(f"ids up to {largest} for {len(vocab) + len(control)} tokens; ids count the tokens from 0")
    base_size = 1 + largest
    appended = [token for token in SPECIAL_TOKENS if token not in control]
    self.special: Mapping[str, int] = {**control, **{token: base_size + i for i, token in enumerate(appended)}}

    # Control tokens are neither added tokens nor pieces of the model here, so that no search for their literals, no
    # merge and no `ignore_merges` can yield their ids.
    control_ids = set(control.values())
    hidden = {piece for piece, i in vocab.items() if i in control_ids}
    pieces = {piece: i for piece, i in vocab.items() if piece not in hidden}
    by_id = {i: piece for piece, i in pieces.items()}
    if len(by_id) < len(pieces):
      piece, i = next((piece, i) for piece, i in pieces.items() if by_id[i] != piece)
      raise ValueError(f"the id {i} is that of {piece!r} and of {by_id[i]!r}")
    first_byte = base_size + len(appended)
    missing = sorted(set(ByteLevel.alphabet()) - pieces.keys())
    pieces.update({byte: first_byte + i for i, byte in enumerate(missing)})

    definition = {
      "version": "1.0",
      "added_tokens": [],
      "normalizer": normalizer,
      "pre_tokenizer": pre_tokenizer,
      "post_processor": None,
      "decoder": _BYTE_LEVEL,
      "model": {
        "type": "BPE",
        **(options or {}),
        "vocab": pieces,
        "merges": [[a, b] for a, b in merges if hidden.isdisjoint((a, b, a + b))],
      },
    }
    with _rust_errors():
      self._rust = RustTokenizer.from_str(json.dumps(definition))
    self.vocab_size = first_byte + len(missing)
    self.fingerprint = fingerprint(self.name, definition, self.special)

  @classmethod
  def from_folder(cls, path: epath.PathLike) -> "BPETokenizer":
    """Read `tokenizer.json`, and `tokenizer_config.json` if it is there, as Hugging Face writes them.

    Every added token, special or not, becomes a control token. Raises ValueError if the model is not a byte-level BPE.
    """
    path = epath.Path(path) / "tokenizer.json"
    definition = read_json_object(path, "a tokenizer as Hugging Face writes it")
    model, pre_tokenizer = _object(path, definition, "model"), _object(path, definition, "pre_tokenizer")
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    kinds = [step.get("type") for step in steps if isinstance(step, dict)] if isinstance(steps, list) else []
    if model.get("type") != "BPE" or "ByteLevel" not in kinds:
      raise ValueError(
        f"{path} holds no byte-level BPE but {str(model.get('type'))[:40]}; use a tokenizer of that kind"
      )
    control = _added_tokens(path, definition.get("added_tokens") or [])
    config = path.parent / "tokenizer_config.json"
    if config.exists():
      decoder = _object(config, read_json_object(config, "settings of a tokenizer"), "added_tokens_decoder")
      if wrong := [i for i, token in decoder.items() if not _is_id(i) or not isinstance(token, dict)]:
        raise ValueError(f"{config}: added_tokens_decoder has {reprlib.repr(wrong[0])}; expected ids with objects")
      control |= _added_tokens(config, [{**token, "id": int(i)} for i, token in decoder.items()])
    vocab, merges = _object(path, model, "vocab"), model.get("merges")
    if wrong := [piece for piece, i in vocab.items() if type(i) is not int]:
      raise ValueError(f"{path}: the id of {wrong[0]!r} in vocab is {reprlib.repr(vocab[wrong[0]])}, no whole number")
    if not isinstance(merges, list):
      raise ValueError(f"{path}: merges is {reprlib.repr(merges)}; a list of pairs is expected")
    # Dropout would make ids random, and no byte is unknown; options that are off are the same as absent ones.
    dropped = ("type", "vocab", "merges", "dropout", "unk_token", "fuse_unk")
    try:
      return cls(
        vocab,
        map(_pair, merges),
        control,
        pre_tokenizer=pre_tokenizer,
        normalizer=definition.get("normalizer"),
        options={option: value for option, value in model.items() if value and option not in dropped},
      )
    except ValueError as error:
      raise ValueError(f"{path}: {error}") from None

  @classmethod
  def from_pieces(
    cls, tokens: Sequence[str], merges: Iterable[str], control: Iterable[int], digits: bool = True
  ) -> "BPETokenizer":
    """Rebuild the tokenizer from the lists of a GGUF file: GPT-2's splitting, digits one by one if `digits`.

    tokens: pieces in the order of their ids, in GPT-2's byte alphabet. merges: `"left right"`, in the order of use.
    control: ids that no text may yield.
    """
    return cls(
      {token: i for i, token in enumerate(tokens)},
      map(_pair, merges),
      {tokens[i]: i for i in sorted(control)},
      pre_tokenizer=splitting(digits),
    )

  def encode(self, text: str) -> list[int]:
    """Encode text; the ids are the base tokenizer's where the text spells none of its added tokens.

    Raises ValueError for a text that the tokenizer cannot split, such as one on which its pattern takes too long.
    """
    with _rust_errors():
      return self._rust.encode(well_formed(text), add_special_tokens=False).ids

  def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
    """Decode ids; bytes that are not UTF-8 become U+FFFD."""
    return decode_runs(checked_ids(ids, self.vocab_size), self.special, skip_special, self._rust.decode)

  def token_bytes(self) -> list[bytes]:
    """Return the bytes of each ordinary token by its id; control tokens and unused ids have none."""
    pieces = [b""] * self.vocab_size
    for piece, i in self._rust.get_vocab().items():
      pieces[i] = b"".join(_BYTES.get(letter) or letter.encode() for letter in piece)
    return pieces


def _byte_letters() -> dict[str, bytes]:
  """Return GPT-2's alphabet: printable bytes stand for themselves, the others follow from U+0100 on."""
  printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
  others = [byte for byte in range(256) if byte not in printable]
  letters = {chr(byte): bytes([byte]) for byte in printable}
  return letters | {chr(256 + n): bytes([byte]) for n, byte in enumerate(others)}


_BYTES = _byte_letters()


def splitting(digits: bool) -> dict[str, Any]:
  """Return the definition of GPT-2's splitting of text, digits one by one if `digits`."""
  return {"type": "Sequence", "pretokenizers": [_DIGITS, _BYTE_LEVEL]} if digits else _BYTE_LEVEL


@contextlib.contextmanager
def _rust_errors() -> Iterator[None]:
  """Turn errors of the library `tokenizers`, bare Exceptions and panics (BaseExceptions), into ValueErrors."""
  try:
    yield
  except BaseException as error:
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
      raise
    raise ValueError(f"the tokenizer cannot be run: {error}") from None


def _pair(merge: str | Sequence[str]) -> tuple[str, str]:
  # files written before tokenizers 0.20 say "a b", later ones ["a", "b"]
  pair = merge.split(" ") if isinstance(merge, str) else merge
  if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(piece, str) for piece in pair):
    raise ValueError(f"the merge {reprlib.repr(merge)} is no pair of pieces")
  return pair[0], pair[1]


def _object(path: epath.Path, source: Mapping[str, Any], key: str) -> dict[str, Any]:
  """Return the object under a key, an empty one for null. Raises ValueError for anything else."""
  value = source.get(key)
  if value is not None and not isinstance(value, dict):
    raise ValueError(f"{path}: {key} is {reprlib.repr(value)}; an object is expected")
  return value or {}


def _is_id(text: str) -> bool:
  return text.isdecimal() and len(text) < 20  # Python refuses to parse very long ones


def _added_tokens(path: epath.Path, tokens: Any) -> dict[str, int]:
  """Return the ids of added tokens by their texts."""
  typed = lambda token: type(token.get("id")) is int and isinstance(token.get("content"), str)
  if not isinstance(tokens, list) or not all(isinstance(token, dict) and typed(token) for token in tokens):
    raise ValueError(f"{path}: added tokens are {reprlib.repr(tokens)}; expected objects with content and id")
  return {token["content"]: token["id"] for token in tokens}


def well_formed(text: str) -> str:
  """Return text with U+FFFD for every half of a surrogate pair, which JSON can hold and UTF-8 cannot."""
  return text if text.isascii() else _HALVES.sub("\ufffd", text)


def fingerprint(*definition: Any) -> str:
  """Return the sha256 of a tokenizer's definition, which must be JSON."""
  return hashlib.sha256(json.dumps(definition, sort_keys=True).encode()).hexdigest()


def checked_ids(ids: Iterable[int], vocab_size: int) -> list[int]:
  """Return ids as a list. Raises ValueError for one outside the vocabulary."""
  checked = [int(i) for i in ids]
  outside = [i for i in checked if not 0 <= i < vocab_size]
  if outside:
    raise ValueError(
      f"id {outside[0]} is not in the vocabulary of {vocab_size}: mask the padded logits before sampling"
    )
  return checked


def decode_runs(
  ids: Sequence[int], special: Mapping[str, int], skip_special: bool, decode_run: Callable[[list[int]], str]
) -> str:
  """Decode ids: runs of ordinary ids by `decode_run`, special ids as their names or not at all."""
  names = {i: name for name, i in special.items()}
  parts = []
  for is_special, run in groupby(ids, key=names.__contains__):
    if not is_special:
      parts.append(decode_run(list(run)))
    elif not skip_special:
      parts.extend(names[i] for i in run)
  return "".join(parts)
