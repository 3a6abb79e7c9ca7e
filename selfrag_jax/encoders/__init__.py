"""Encoders: functions of texts, or of token ids, to vectors."""

from typing import TYPE_CHECKING

from selfrag_jax.lazy import lazy_names

if TYPE_CHECKING:
  from selfrag_jax.encoders.base import TextEncoder as TextEncoder
  from selfrag_jax.encoders.hashed_words import HashingEncoder as HashingEncoder
  from selfrag_jax.encoders.language_model import LMEncoder as LMEncoder
  from selfrag_jax.encoders.load import BertEncoder as BertEncoder
  from selfrag_jax.encoders.load import load_encoder as load_encoder
else:
  __getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
      "base": ["TextEncoder"],
      "hashed_words": ["HashingEncoder"],
      "language_model": ["LMEncoder"],
      "load": ["BertEncoder", "load_encoder"],
    },
  )
