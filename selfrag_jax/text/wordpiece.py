"""WordPiece through tensorflow-text, as BERT's uncased models have it. TensorFlow is imported when one is opened."""

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence

from etils import epath

from selfrag_jax.text.tensorflow import tensorflow
from selfrag_jax.text.tokenizer import checked_ids, fingerprint

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
LONGEST = 100  # characters of a word; a longer one is unknown (arXiv 1810.04805, reference code)
_LONG = re.compile(rf"[^\s!-/:-@\[-`{{-~]{{{LONGEST + 1},}}")

_SPACES = "\t\n\r"
_CONTROL = {code: None for code in (*range(32), 127) if chr(code) not in _SPACES}


class WordPieceTokenizer:
  """Run a WordPiece vocabulary over text in lower case without accents, as BERT's uncased models do.

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
    )  # its own lower-casing differs on full-width letters and ligatures

  @classmethod
  def from_file(cls, path: epath.PathLike) -> "WordPieceTokenizer":
    """Read a `vocab.txt`."""
    return cls(epath.Path(path).read_text(encoding="utf-8").removesuffix("\n").split("\n"))

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
      plain = "".join(char for char in decomposed if char in _SPACES or not _dropped(unicodedata.category(char)))
    return _LONG.sub(f" {self._unknown} ", plain.lower())


def _dropped(category: str) -> bool:
  """Tell whether characters are left out: accents, and control and format characters."""
  return category in ("Mn", "Cc", "Cf", "Co", "Cs")
