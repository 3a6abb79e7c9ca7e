"""A WordPiece tokenizer for BERT's uncased models, through tensorflow-text; opening one imports TensorFlow."""

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from etils import epath

from selfrag_jax.storage.json_lines import refuse_pointer
from selfrag_jax.text.tensorflow import tensorflow
from selfrag_jax.text.tokenizer import checked_ids, fingerprint

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
LONGEST = 100  # characters of a word; a longer one is unknown (arXiv 1810.04805, reference code)
_LONG = re.compile(rf"[^\s!-/:-@\[-`{{-~]{{{LONGEST + 1},}}")
_IDEOGRAPH = re.compile(  # the blocks that BERT's reference code names
  "[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002a6df\U0002a700-\U0002ceaf\U0002f800-\U0002fa1f]"
)

_SPACES = "\t\n\r"
_CONTROL = {code: None for code in (*range(32), 127) if chr(code) not in _SPACES}


class WordPieceTokenizer:
  """A WordPiece vocabulary, run over text in lower case without accents, as BERT's uncased models do.

  Text that spells a special token is only text.
  """

  name = "wordpiece"

  def __init__(self, vocabulary: Sequence[str]):
    """Raises ValueError for a vocabulary without BERT's special tokens, or with a piece twice."""
    self.pieces = tuple(vocabulary)
    ids = {piece: i for i, piece in enumerate(vocabulary)}
    if missing := [token for token in SPECIAL if token not in ids]:
      raise ValueError(f"the vocabulary has no {', '.join(missing)}; it is not one of BERT's")
    if len(ids) < len(self.pieces):
      raise ValueError(f"the vocabulary has {len(self.pieces)} pieces, {len(ids)} of them different")
    self.special: Mapping[str, int] = {token: ids[token] for token in SPECIAL}
    self.vocab_size = len(self.pieces)
    self.fingerprint = fingerprint(self.name, self.pieces)
    self._unknown = next(char for char in map(chr, range(0x2600, 0x27BF)) if char not in ids)
    tf, tf_text = tensorflow()
    self._model = tf_text.FastBertTokenizer(
      vocab=list(self.pieces),
      token_out_type=tf.int32,
      max_bytes_per_word=4 * LONGEST,
      lower_case_nfd_strip_accents=False,
    )  # FastBertTokenizer's own lower-casing differs on full-width letters and ligatures

  @classmethod
  def from_file(cls, path: epath.PathLike) -> "WordPieceTokenizer":
    """Read a `vocab.txt`. Raises ValueError, naming the file, for anything else."""
    refuse_pointer(path)
    try:
      return cls(epath.Path(path).read_text(encoding="utf-8").removesuffix("\n").split("\n"))
    except ValueError as error:
      raise ValueError(f"{path}: {error}; expected one piece a line in UTF-8") from None

  def encode(self, text: str) -> list[int]:
    """Encode text, without `[CLS]` and `[SEP]`."""
    return self.encode_batch([text])[0]

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    """Encode several texts at once, which is many times faster than one by one."""
    if not texts:
      return []
    return self._model.tokenize([self._plain(text) for text in texts]).to_list()

  def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
    """Decode ids with a space between words."""
    special = set(self.special.values()) if skip_special else set()
    pieces = (self.pieces[i] for i in checked_ids(ids, self.vocab_size) if i not in special)
    return " ".join(pieces).replace(" ##", "")

  def _plain(self, text: str) -> str:
    plain = text.translate(_CONTROL)
    if not plain.isascii():
      decomposed = unicodedata.normalize("NFD", plain)
      plain = "".join(char for char in decomposed if char in _SPACES or not _dropped(char))
    return _LONG.sub(self._without_long_words, plain.lower())

  def _without_long_words(self, run: re.Match[str]) -> str:
    """Replace words that are too long by an unknown character; ideographs and punctuation marks stand alone."""
    parts = ((alone, "".join(chars)) for alone, chars in groupby(run[0], _stands_alone))
    return "".join(part if alone or len(part) <= LONGEST else f" {self._unknown} " for alone, part in parts)


def _stands_alone(char: str) -> bool:
  return unicodedata.category(char)[0] == "P" or _IDEOGRAPH.match(char) is not None


def _dropped(char: str) -> bool:
  """Tell whether a character is dropped: an accent, a control, format or private-use character, or U+FFFD."""
  return char == "\ufffd" or unicodedata.category(char) in ("Mn", "Cc", "Cf", "Co", "Cs")
