"""A SentencePiece tokenizer, through tensorflow-text, without control tokens; opening one imports TensorFlow."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from etils import epath

from selfrag_jax.storage.json_lines import refuse_pointer
from selfrag_jax.text.special import SPECIAL_TOKENS
from selfrag_jax.text.tensorflow import tensorflow
from selfrag_jax.text.tokenizer import checked_ids, decode_runs, fingerprint, well_formed

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # types of pieces, in GGUF too
BPE = 2  # the type of a model
SPACE = "▁"  # what stands for a space in a piece
_MARKUP = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")


class SentencePieceTokenizer:
  """A SentencePiece model as a tokenizer. Ids: the model's own, then the `SPECIAL_TOKENS` that the model lacks.

  The model's control pieces, its unknown piece, and added pieces that are spelled `<...>` or `[...]` (Gemma's
  `<start_of_turn>`) are special: text that spells them is only text. The model's own normalisation applies: most models
  squeeze white space, newlines too, and a model without byte pieces loses characters that it does not know.
  """

  name = "sentencepiece"

  def __init__(self, model: bytes):
    """Read a serialised model. Raises ValueError for anything else."""
    message, model = _without_control(model)
    names = {i: piece.piece for i, piece in enumerate(message.pieces) if piece.type in (UNKNOWN, CONTROL)}
    control = {name: i for i, name in names.items()}
    appended = [token for token in SPECIAL_TOKENS if token not in control]
    size = len(message.pieces)
    self.special: Mapping[str, int] = {**control, **{token: size + i for i, token in enumerate(appended)}}
    self.vocab_size = size + len(appended)
    self.fingerprint = fingerprint(self.name, model.hex(), self.special)
    self.model = model
    tf, tf_text = tensorflow()
    try:
      self._model = tf_text.SentencepieceTokenizer(model=model, out_type=tf.int32)
      self._model.tokenize("")  # the library reads the model at the first call
    except tf.errors.OpError as error:
      raise ValueError(f"this is no SentencePiece model that can be run: {error.message}") from None

  @classmethod
  def from_file(cls, path: epath.PathLike) -> "SentencePieceTokenizer":
    """Read a `.model` file. Raises ValueError, naming the file, for anything else."""
    refuse_pointer(path)
    try:
      return cls(epath.Path(path).read_bytes())
    except ValueError as error:
      raise ValueError(f"{path}: {error}") from None

  @classmethod
  def from_pieces(
    cls, pieces: Sequence[str], scores: Sequence[float], types: Sequence[int], *, unknown: int, adds_space: bool
  ) -> "SentencePieceTokenizer":
    """Rebuild a BPE with byte pieces from the lists of a GGUF file, which keeps white space as it is.

    unknown: the id of the piece for unknown characters. adds_space: whether a text is read as if a space stood first.
    """
    message = _message()()
    for i, (piece, score, kind) in enumerate(zip(pieces, scores, types, strict=True)):
      # llama.cpp writes added pieces with spaces
      message.pieces.add(piece=piece.replace(" ", SPACE), score=score, type=UNKNOWN if i == unknown else kind)
    message.trainer_spec.model_type, message.trainer_spec.byte_fallback = BPE, True
    spec = message.normalizer_spec
    spec.name, spec.add_dummy_prefix, spec.remove_extra_whitespaces = "identity", adds_space, False
    return cls(message.SerializeToString())

  @property
  def adds_space(self) -> bool:
    """Whether a text is read as if a space stood first."""
    return _parsed(self.model).normalizer_spec.add_dummy_prefix

  @property
  def pieces(self) -> list[tuple[str, float, int]]:
    """The pieces in the order of their ids, each with its score and type."""
    return [(piece.piece, piece.score, piece.type) for piece in _parsed(self.model).pieces]

  def encode(self, text: str) -> list[int]:
    """Encode text as pieces of the model."""
    return self._model.tokenize(well_formed(text)).numpy().tolist()

  def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
    """Decode ids."""
    return decode_runs(checked_ids(ids, self.vocab_size), self.special, skip_special, self._decode_pieces)

  def _decode_pieces(self, ids: Sequence[int]) -> str:
    return self._model.detokenize(list(ids)).numpy().decode(errors="replace")


def _parsed(model: bytes) -> Any:
  from google.protobuf.message import DecodeError

  message = _message()()
  try:
    message.ParseFromString(model)
  except DecodeError as error:
    raise ValueError(f"this is no SentencePiece model: {error}") from None
  if not message.pieces:
    raise ValueError("this is no SentencePiece model: it has no pieces")
  return message


def _without_control(model: bytes) -> tuple[Any, bytes]:
  """Parse a model, and turn added pieces that look like markup into control pieces, which no text can yield."""
  message = _parsed(model)
  for piece in message.pieces:
    if piece.type == USER_DEFINED and _MARKUP.fullmatch(piece.piece):
      piece.type = CONTROL
  return message, message.SerializeToString()


def _message() -> Any:
  """Return a message class with the fields of SentencePiece's `ModelProto` that are used here; others pass through."""
  from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

  file = descriptor_pb2.FileDescriptorProto(name="selfrag_jax.proto", package="selfrag_jax", syntax="proto2")
  field = descriptor_pb2.FieldDescriptorProto

  def declare(name: str, fields: Mapping[str, tuple[int, Any, str | None]]) -> None:
    message = file.message_type.add(name=name)
    for field_name, (number, kind, default) in fields.items():
      label = field.LABEL_REPEATED if field_name == "pieces" else field.LABEL_OPTIONAL
      entry = message.field.add(name=field_name, number=number, label=label)
      if isinstance(kind, str):
        entry.type, entry.type_name = field.TYPE_MESSAGE, f".selfrag_jax.{kind}"
      else:
        entry.type = kind
      if default is not None:
        entry.default_value = default

  text, number, integer, boolean = field.TYPE_STRING, field.TYPE_FLOAT, field.TYPE_INT32, field.TYPE_BOOL
  declare("Piece", {"piece": (1, text, None), "score": (2, number, None), "type": (3, integer, "1")})
  declare("Trainer", {"model_type": (3, integer, "1"), "byte_fallback": (35, boolean, "false")})
  flags = ("add_dummy_prefix", "remove_extra_whitespaces", "escape_whitespaces")
  declare("Normalizer", {"name": (1, text, None), **{flag: (3 + i, boolean, "true") for i, flag in enumerate(flags)}})
  specs = {"trainer_spec": (2, "Trainer", None), "normalizer_spec": (3, "Normalizer", None)}
  declare("Model", {"pieces": (1, "Piece", None), **specs})
  pool = descriptor_pool.DescriptorPool()
  pool.Add(file)
  return message_factory.GetMessageClass(pool.FindMessageTypeByName("selfrag_jax.Model"))
