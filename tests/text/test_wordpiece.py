"""WordPiece: it gives the ids of Hugging Face's tokenizers, for text of any script."""

import random
import string

import pytest
from tokenizers import BertWordPieceTokenizer

from selfrag_jax.text.wordpiece import SPECIAL, WordPieceTokenizer

LETTERS = string.ascii_lowercase + string.digits + string.punctuation + "éßжθ東京한अก"
PIECES = [
  *["the", "a", "of", "and", "in", "to", "zebra", "otter", "river", "東", "京", "naive", "km2"],
  "zeb",
  "##ra",
  "##ing",
  "##s",
  "ж",
  "##ж",
]
VOCABULARY = list(dict.fromkeys([*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS), *PIECES]))


@pytest.fixture(scope="module")
def tokenizer():
  return WordPieceTokenizer(VOCABULARY)


def random_texts(n):
  rng = random.Random(0)
  ranges = [(32, 127), (160, 0x600), (0x900, 0x980), (0x2000, 0x2C00), (0x4E00, 0x4F00), (0xFF00, 0xFFEF), (1, 32)]
  char = lambda: chr(rng.randrange(*rng.choice(ranges)))
  return ["".join(char() for _ in range(rng.randrange(60))) for _ in range(n)]


def test_ids_are_those_of_hugging_face(tokenizer):
  theirs = BertWordPieceTokenizer({piece: i for i, piece in enumerate(VOCABULARY)}, lowercase=True)
  texts = [
    *("", " ", "The Zebra's river, in 東京!", "NAÏVE café e\u0301", "ﬁne km² №", "ＦＵＬＬ width", "İstanbul ẞ"),
    *(
      "a\ufffdb \ufffd",
      "東" * 100_000,
      "ж。" * 300 + "ж" * 101 + "東京" * 80 + "ж" * 100,
      "a\u200db\u0000c\u00add",
      "tab\tline\nnon\u00a0breaking\u3000wide",
      "👩‍👩‍👧 🇩🇪",
      "ж" * 60 + " " + "ж" * 101,
    ),
    *("x" * 100 + " " + "x" * 101, "zebra " * 2000, "z" * 10_000, "re-st.op!" * 50, "हिन्दी ไทย 한국어"),
    *random_texts(1000),
  ]
  for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
    assert ids == theirs.encode(text, add_special_tokens=False).ids, repr(text)


def test_text_that_spells_a_special_token_is_text(tokenizer):
  ids = tokenizer.encode("[CLS] zebra [SEP] [PAD]")
  assert not set(ids) & {tokenizer.special[name] for name in ("[CLS]", "[SEP]", "[PAD]", "[MASK]")}


def test_words_can_be_read_back(tokenizer):
  ids = [tokenizer.special["[CLS]"], *tokenizer.encode("the zebras  in the river")]
  assert tokenizer.decode(ids) == "[CLS] the zebras in the river"
  assert tokenizer.decode(ids, skip_special=True) == "the zebras in the river"
  with pytest.raises(ValueError, match="vocab"):
    tokenizer.decode([len(VOCABULARY)])


@pytest.mark.parametrize(
  ("vocabulary", "message"), [(["a", "b"], r"no \[PAD\], \[UNK\]"), ([*SPECIAL, "a", "a"], "7 pieces, 6 of them")]
)
def test_another_vocabulary_is_refused(vocabulary, message):
  with pytest.raises(ValueError, match=message):
    WordPieceTokenizer(vocabulary)


def test_a_file_and_its_fingerprint(tmp_path, tokenizer):
  (tmp_path / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n", encoding="utf-8")
  same = WordPieceTokenizer.from_file(tmp_path / "vocab.txt")
  assert same.fingerprint == tokenizer.fingerprint
  assert same.encode("the otter") == tokenizer.encode("the otter")
  assert WordPieceTokenizer([*VOCABULARY, "new"]).fingerprint != tokenizer.fingerprint


def test_half_a_surrogate_pair_is_left_out_as_the_replacement_character_is(tokenizer):
  assert tokenizer.encode("ot\ud800ter") == tokenizer.encode("ot\ufffdter") == tokenizer.encode("otter")


@pytest.mark.parametrize("content", [b"", b"\xff", b"a\nb", "\n".join([*SPECIAL, "a", "a"]).encode()])
def test_a_file_that_is_no_vocabulary_is_named(tmp_path, content):
  (tmp_path / "vocab.txt").write_bytes(content)
  with pytest.raises(ValueError, match=r"vocab\.txt: .*; expected one piece a line in UTF-8"):
    WordPieceTokenizer.from_file(tmp_path / "vocab.txt")
