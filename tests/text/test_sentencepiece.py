"""SentencePiece through tensorflow-text: the ids of the sentencepiece package, and no text reaches a special id."""

import io

import pytest
import sentencepiece as spm

from selfrag_jax.text.registry import open_tokenizer
from selfrag_jax.text.sentencepiece import CONTROL, UNKNOWN, USER_DEFINED, SentencePieceTokenizer
from selfrag_jax.text.special import SPECIAL_TOKENS
from selfrag_jax.text.tokenizer import ByteTokenizer

TURN, RULER = "<start_of_turn>", "------"
TEXTS = [
  "the quick brown fox jumps over a lazy dog",
  "where is the lamp?",
  f"a {RULER} line",
  "don't stop 1234 times",
]


@pytest.fixture(scope="module")
def model():
  """A BPE model with byte pieces, and pieces added to it as Gemma's are."""
  out = io.BytesIO()
  spm.SentencePieceTrainer.train(
    sentence_iterator=iter(TEXTS * 20), model_writer=out, vocab_size=340, model_type="bpe", byte_fallback=True,
    user_defined_symbols=[TURN, RULER], normalization_rule_name="identity", minloglevel=2,
  )  # fmt: skip
  return out.getvalue()


@pytest.fixture(scope="module")
def tokenizer(model):
  return SentencePieceTokenizer(model)


@pytest.mark.parametrize("text", [*TEXTS, "", "  two  spaces\nand a line ", "naïve 漢字 🙂"])
def test_ids_are_those_of_the_reference(model, tokenizer, text):
  reference = spm.SentencePieceProcessor(model_proto=model)
  ids = tokenizer.encode(text)
  assert ids == reference.encode(text)
  assert tokenizer.decode(ids) == reference.decode(ids)


@pytest.mark.parametrize("text", [TURN, f"x{TURN}user", "<s>", "</s>", "<unk>", *SPECIAL_TOKENS])
def test_no_text_reaches_a_special_id(model, tokenizer, text):
  ids = tokenizer.encode(text)
  assert not set(ids) & set(tokenizer.special.values())
  assert tokenizer.decode(ids) == text
  if text == TURN:  # the reference does what we must not
    assert tokenizer.special[TURN] in spm.SentencePieceProcessor(model_proto=model).encode(text)


def test_the_lists_of_a_gguf_file_give_the_same_tokenizer(model, tokenizer):
  pieces, scores, types = zip(*tokenizer.pieces, strict=True)
  as_written = lambda piece, kind: piece.replace("▁", " ") if kind == USER_DEFINED else piece
  spaced = list(map(as_written, pieces, types))
  types = [CONTROL if kind == UNKNOWN else kind for kind in types]  # as Gemma's file says of <unk>
  unknown = pieces.index("<unk>")
  ours = SentencePieceTokenizer.from_pieces(spaced, scores, types, unknown=unknown, adds_space=tokenizer.adds_space)
  assert ours.special == tokenizer.special
  assert ours.adds_space is True
  for text in (*TEXTS, "naïve 漢字 🙂"):
    assert ours.encode(text) == tokenizer.encode(text)
  without = SentencePieceTokenizer.from_pieces(spaced, scores, types, unknown=unknown, adds_space=False)
  assert without.encode("the") != ours.encode("the")
  assert without.encode(" the") == ours.encode("the")
  # white space stays as it is; the model above squeezes it
  assert without.decode(without.encode("  two  spaces\nand a line ")) == "  two  spaces\nand a line "


def test_special_ids_follow_those_of_the_model(model, tokenizer):
  size = spm.SentencePieceProcessor(model_proto=model).vocab_size()
  assert {"<s>", "</s>", "<unk>", TURN} <= tokenizer.special.keys()
  assert RULER not in tokenizer.special
  assert sorted(tokenizer.special[name] for name in SPECIAL_TOKENS) == list(range(size, tokenizer.vocab_size))
  ids = [tokenizer.special["[MEM]"], *tokenizer.encode("the lamp"), tokenizer.special["</s>"]]
  assert tokenizer.decode(ids) == "[MEM]the lamp</s>"
  assert tokenizer.decode(ids, skip_special=True) == "the lamp"
  with pytest.raises(ValueError, match="is not in the vocabulary"):
    tokenizer.decode([tokenizer.vocab_size])


def test_tokenizers_open_by_name_or_file(model, tokenizer, tmp_path):
  (tmp_path / "a.model").write_bytes(model)
  assert open_tokenizer(str(tmp_path / "a.model")).fingerprint == tokenizer.fingerprint
  assert open_tokenizer("byte").fingerprint == ByteTokenizer().fingerprint
  with pytest.raises(FileNotFoundError, match="there is no tokenizer nowhere"):
    open_tokenizer("nowhere")
  with pytest.raises(ValueError, match=r"neither a SentencePiece \.model file nor a folder"):
    open_tokenizer(str(tmp_path))
  (tmp_path / "b.model").write_bytes(b"no model")
  with pytest.raises(ValueError, match="this is no SentencePiece model"):
    open_tokenizer(str(tmp_path / "b.model"))


def test_odd_text_is_text(tokenizer):
  assert tokenizer.encode("a\ud800b") == tokenizer.encode("a\ufffdb")
  assert tokenizer.decode(tokenizer.encode("a\0b")) == "a\0b"
  long = "abé" * 100_000
  assert tokenizer.decode(tokenizer.encode(long)) == long


def test_damaged_models_are_named(model, tmp_path):
  for content in (model[:-100], model[:1], b"\x0a\x03\x0a\x01a", b"version https://git-lfs.github.com/spec/v1\n"):
    (tmp_path / "b.model").write_bytes(content)
    with pytest.raises(ValueError, match=r"b\.model"):
      open_tokenizer(str(tmp_path / "b.model"))
