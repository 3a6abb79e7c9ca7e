"""Text in, token ids out: tokenizers, special tokens and the rendering of conversations."""

from typing import TYPE_CHECKING

from selfrag_jax.lazy import lazy_names

if TYPE_CHECKING:
  from selfrag_jax.text.chat import ChatTemplate as ChatTemplate
  from selfrag_jax.text.chat import render_conversation as render_conversation
  from selfrag_jax.text.chat import render_for_completion as render_for_completion
  from selfrag_jax.text.chat import visualize_tokenization as visualize_tokenization
  from selfrag_jax.text.chunking import Span as Span
  from selfrag_jax.text.chunking import chunk as chunk
  from selfrag_jax.text.registry import open_tokenizer as open_tokenizer
  from selfrag_jax.text.sentencepiece import SentencePieceTokenizer as SentencePieceTokenizer
  from selfrag_jax.text.tokenizer import BPETokenizer as BPETokenizer
  from selfrag_jax.text.tokenizer import ByteTokenizer as ByteTokenizer
  from selfrag_jax.text.tokenizer import Tokenizer as Tokenizer
  from selfrag_jax.text.tokenizer import WordTokenizer as WordTokenizer
  from selfrag_jax.text.wordpiece import WordPieceTokenizer as WordPieceTokenizer
else:
  __getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
      "chat": ["ChatTemplate", "render_conversation", "render_for_completion", "visualize_tokenization"],
      "chunking": ["Span", "chunk"],
      "registry": ["open_tokenizer"],
      "sentencepiece": ["SentencePieceTokenizer"],
      "tokenizer": ["BPETokenizer", "ByteTokenizer", "Tokenizer", "WordTokenizer"],
      "wordpiece": ["WordPieceTokenizer"],
    },
  )
