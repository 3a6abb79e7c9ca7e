"""Tokenizers by name or file."""

from etils import epath

from selfrag_jax.text.tokenizer import BPETokenizer, ByteTokenizer, Tokenizer


def open_tokenizer(source: str) -> Tokenizer:
  """Open `byte`, a SentencePiece `.model` file, or a folder with the `tokenizer.json` of a byte-level BPE.

  Raises FileNotFoundError for a missing file, ValueError for a file of another kind.
  """
  if source == "byte":
    return ByteTokenizer()
  path = epath.Path(source)
  if not path.exists():
    raise FileNotFoundError(f"there is no tokenizer {source}; give byte, a SentencePiece .model file or a folder")
  if path.suffix == ".model":
    from selfrag_jax.text.sentencepiece import SentencePieceTokenizer  # TensorFlow takes seconds to import

    return SentencePieceTokenizer.from_file(path)
  if (path / "tokenizer.json").exists():
    return BPETokenizer.from_folder(path)
  raise ValueError(f"{source} is neither a SentencePiece .model file nor a folder with a tokenizer.json")
