"""A SentencePiece tokenizer, through tensorflow-text, without control tokens; opening one imports TensorFlow."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from etils import epath

from selfrag_jax.storage.json_lines import refuse_pointer
from selfrag_jax.text.special import SPECIAL_TOKENS
from selfrag_jax.text.tensorflow import tensorflow
from selfrag_jax.text.tokenizer import checked_ids, decode_runs, fingerprint, well_formed

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # types of pieces
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

  def encode(self, text: str) -> list[int]:
    """Encode text as pieces of the model."""
    return self._model.tokenize(well_formed(text)).numpy().tolist()

  def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
    """Decode ids."""
    return decode_runs(checked_ids(ids, self.vocab_size), self.special, skip_special, self._decode_pieces)

  def _decode_pieces(self, ids: Sequence[int]) -> str:
    return self._model.detokenize(list(ids)).numpy().decode(errors="replace")


def _without_control(model: bytes) -> tuple[Any, bytes]:
  """Parse a model, and turn added pieces that look like markup into control pieces, which no text can yield."""
  from google.protobuf.message import DecodeError

  message = _message()()
  try:
    message.ParseFromString(model)
  except DecodeError as error:
    raise ValueError(f"this is no SentencePiece model: {error}") from None
  if not message.pieces:
    raise ValueError("this is no SentencePiece model: it has no pieces")
  for piece in message.pieces:
    if piece.type == USER_DEFINED and _MARKUP.fullmatch(piece.piece):
      piece.type = CONTROL
  return message, message.SerializeToString()


def _message() -> Any:
  """Return a message class with the fields of SentencePiece's `ModelProto` that are read here; others pass through."""
  from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

  file = descriptor_pb2.FileDescriptorProto(name="selfrag_jax.proto", package="selfrag_jax", syntax="proto2")
  field = descriptor_pb2.FieldDescriptorProto
  piece = file.message_type.add(name="Piece")
  piece.field.add(name="piece", number=1, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
  piece.field.add(name="type", number=3, type=field.TYPE_INT32, label=field.LABEL_OPTIONAL, default_value="1")
  whole = file.message_type.add(name="Model")
  whole.field.add(
    name="pieces", number=1, type=field.TYPE_MESSAGE, type_name=".selfrag_jax.Piece", label=field.LABEL_REPEATED
  )
  pool = descriptor_pool.DescriptorPool()
  pool.Add(file)
  return message_factory.GetMessageClass(pool.FindMessageTypeByName("selfrag_jax.Model"))
