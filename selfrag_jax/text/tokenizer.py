"""Tokenizers that never parse text for control tokens.

`encode` yields ordinary ids whatever the text says; special ids are reached by name through `special`, and only
`chat.py` and the rollouts put them into a sequence. So a document cannot close its own retrieval block, and a user
cannot speak as the system.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, Protocol

from etils import epath

from selfrag_jax.text.special import SPECIAL_TOKENS

_WORD_OR_MARK = re.compile(r"\w+|[^\w\s]")
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_DIGITS = {"type": "Digits", "individual_digits": True}


class Tokenizer(Protocol):
  """What every part that reads or writes text asks of a tokenizer.

  name: a short name for messages. vocab_size: ids are `0 <= id < vocab_size` (a model may pad its embedding further).
  special: name -> id, all of `SPECIAL_TOKENS` and what the base model has besides. fingerprint: sha256 over everything
  that defines the ids; checkpoints store it.
  """

  name: str
  vocab_size: int
  special: Mapping[str, int]
  fingerprint: str

  def encode(self, text: str) -> list[int]:
    """Encode text as ordinary ids, never a special one."""
    ...

  def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
    """Decode ids, special ones as their names or not at all. Raises ValueError for an id outside the vocabulary."""
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
    """Decode ids with a space between pieces, none before `.,?!:;`."""
    first = len(SPECIAL_TOKENS) if skip_special else 0
    text = " ".join(self._pieces[i] for i in checked_ids(ids, self.vocab_size) if i >= first)
    return re.sub(r" (?=[.,?!:;])", "", text)


class ByteTokenizer:
  """Give every UTF-8 byte one id, after the special tokens (so pad is 0)."""

  name = "byte"

  def __init__(self):
    self.special: Mapping[str, int] = {token: i for i, token in enumerate(SPECIAL_TOKENS)}
    self.vocab_size = len(SPECIAL_TOKENS) + 256
    self.fingerprint = fingerprint(self.name, SPECIAL_TOKENS)

  def encode(self, text: str) -> list[int]:
    """Encode text as its UTF-8 bytes."""
    return [len(SPECIAL_TOKENS) + byte for byte in text.encode()]

  def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
    """Decode ids; bytes that are not UTF-8 become U+FFFD."""
    return decode_runs(checked_ids(ids, self.vocab_size), self.special, skip_special, self._decode_bytes)

  def _decode_bytes(self, ids: Sequence[int]) -> str:
    return bytes(i - len(SPECIAL_TOKENS) for i in ids).decode(errors="replace")


class BPETokenizer:
  """Run a pretrained byte-level BPE in the Rust library `tokenizers`, without its control tokens.

  Ids: the base vocabulary as it is, then those of `SPECIAL_TOKENS` that are not among its control tokens, then the
  bytes that it lacks (21 in SmolLM2), so that no text is lost. Build one with `from_folder` or `from_pieces`.
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

    base_size = 1 + max((*vocab.values(), *control.values()))
    appended = [token for token in SPECIAL_TOKENS if token not in control]
    self.special: Mapping[str, int] = {**control, **{token: base_size + i for i, token in enumerate(appended)}}

    # A control token is no added token here and no piece of the model either, so that neither a search for its literal
    # nor a merge nor `ignore_merges` can yield its id.
    control_ids = set(control.values())
    hidden = {piece for piece, i in vocab.items() if i in control_ids}
    pieces = {piece: i for piece, i in vocab.items() if piece not in hidden}
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
    self._rust = RustTokenizer.from_str(json.dumps(definition))
    self.vocab_size = first_byte + len(missing)
    self.fingerprint = fingerprint(self.name, definition, self.special)

  @classmethod
  def from_folder(cls, path: epath.PathLike) -> "BPETokenizer":
    """Read `tokenizer.json`, and `tokenizer_config.json` if it is there, as Hugging Face writes them.

    Every added token, special or not, becomes a control token. Raises ValueError if the model is not a byte-level BPE.
    """
    folder = epath.Path(path)
    definition = json.loads((folder / "tokenizer.json").read_bytes())
    model, pre_tokenizer = definition["model"], definition["pre_tokenizer"] or {}
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    if model["type"] != "BPE" or "ByteLevel" not in {step.get("type") for step in steps}:
      raise ValueError(f"{folder} holds no byte-level BPE but {model['type']}; use a tokenizer of that kind")
    control = {token["content"]: token["id"] for token in definition["added_tokens"]}
    config = folder / "tokenizer_config.json"
    if config.exists():
      added = json.loads(config.read_bytes()).get("added_tokens_decoder", {})
      control |= {token["content"]: int(i) for i, token in added.items()}
    # Dropout would make ids random, and no byte is unknown; options that are off are the same as absent ones.
    dropped = ("type", "vocab", "merges", "dropout", "unk_token", "fuse_unk")
    return cls(
      model["vocab"],
      map(_pair, model["merges"]),
      control,
      pre_tokenizer=pre_tokenizer,
      normalizer=definition["normalizer"],
      options={option: value for option, value in model.items() if value and option not in dropped},
    )

  @classmethod
  def from_pieces(
    cls, tokens: Sequence[str], merges: Iterable[str], control: Iterable[int], digits: bool = True
  ) -> "BPETokenizer":
    """Rebuild the tokenizer from the lists of a GGUF file: GPT-2's splitting, digits one by one if `digits`.

    tokens: pieces in the order of their ids, in GPT-2's byte alphabet. merges: `"left right"`, the first applied first.
    control: ids of the tokens that text must not reach.
    """
    return cls(
      {token: i for i, token in enumerate(tokens)},
      map(_pair, merges),
      {tokens[i]: i for i in sorted(control)},
      pre_tokenizer={"type": "Sequence", "pretokenizers": [_DIGITS, _BYTE_LEVEL]} if digits else _BYTE_LEVEL,
    )

  def encode(self, text: str) -> list[int]:
    """Encode text; the ids of the base tokenizer, where the text spells none of its added tokens."""
    return self._rust.encode(text, add_special_tokens=False).ids

  def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
    """Decode ids; bytes that are not UTF-8 become U+FFFD."""
    return decode_runs(checked_ids(ids, self.vocab_size), self.special, skip_special, self._rust.decode)


def _pair(merge: str | Sequence[str]) -> tuple[str, str]:
  # files written before tokenizers 0.20 say "a b", later ones ["a", "b"]
  left, right = merge.split(" ") if isinstance(merge, str) else merge
  return left, right


def fingerprint(*definition: Any) -> str:
  """Return the sha256 of what defines a tokenizer, which must be JSON."""
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
  """Decode ids: runs of ordinary ones by `decode_run`, special ones as their names or not at all."""
  names = {i: name for name, i in special.items()}
  parts = []
  for is_special, run in groupby(ids, key=names.__contains__):
    if not is_special:
      parts.append(decode_run(list(run)))
    elif not skip_special:
      parts.extend(names[i] for i in run)
  return "".join(parts)
