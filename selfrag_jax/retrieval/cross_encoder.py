"""Cross-encoders: a BERT that reads query and document together and scores how well they fit (arXiv 1901.04085)."""

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from selfrag_jax.encoders import bert
from selfrag_jax.encoders.base import STEP, computed_in
from selfrag_jax.encoders.batches import Spread, embed_by_length
from selfrag_jax.encoders.bert import Bert, BertConfig, BertEncoder, BertModel, locate_bert
from selfrag_jax.ragged import length_mask, round_up
from selfrag_jax.retrieval.document import Document
from selfrag_jax.typing import Array, ArrayLike, Params, PRNGKey

QUERY_TOKENS = 64  # most tokens of a query; the document gets the rest of the row


@partial(jax.jit, static_argnames=("config", "closing"))
def score(config: BertConfig, params: Params, tokens_BxT: ArrayLike, lengths_B: ArrayLike, closing: int) -> Array:
  """Score right-padded pairs `[CLS] query [SEP] document [SEP]`, f32 [B]; `closing` is the id of `[SEP]`."""
  tokens, lengths = jnp.asarray(tokens_BxT), jnp.asarray(lengths_B)
  mask = length_mask(jnp.maximum(lengths, 1), tokens.shape[1], jnp)
  closes = tokens == closing
  types = (jnp.cumsum(closes, axis=1) - closes > 0).astype(jnp.int32)  # 1 behind the first [SEP]
  scores: Any = Bert(config).apply(params, tokens, mask, types)
  return scores[:, 0]


class CrossEncoder(BertModel):
  """A reranker: a function that maps a query and N documents to scores f32 [N]; higher is better."""

  _spread: Spread | None = None

  @classmethod
  def from_encoder(cls, encoder: BertEncoder, key: PRNGKey) -> "CrossEncoder":
    """Make a cross-encoder from the parameters of a text encoder and an untrained head."""
    config = BertConfig(**{**vars(encoder.config), "labels": 1})
    fresh = nn.unbox(bert.init_bert(config, key))["params"]
    head = {name: fresh[name] for name in ("pooler", "head")}
    return cls(config, {"params": {**encoder.params["params"], **head}}, encoder.tokenizer)

  def __call__(self, query: str, documents: Sequence[Document]) -> np.ndarray:
    """Score N documents for a query, f32 [N]."""
    rows = self.pairs([query] * len(documents), [document.text for document in documents])
    return self.scores(rows)

  def scores(self, rows: Sequence[Sequence[int]]) -> np.ndarray:
    """Score N rows of token ids that `pairs` returns, f32 [N]."""
    if self._spread is None or self._spread.params is not self.params:
      closing = self.tokenizer.special["[SEP]"]
      read = lambda params, *batch: score(self.config, params, *batch, closing)[:, None]
      self._spread = Spread(read, self.params)
    rounded = lambda length: min(round_up(length, STEP), max(self.max_tokens, length))
    return embed_by_length(rows, self._spread, 1, rounded)[:, 0]

  def pairs(self, queries: Sequence[str], texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of `[CLS] query [SEP] text [SEP]` for each pair, cut to `max_tokens`."""
    return join_pairs(self.tokenizer.encode_batch(queries), self.tokenizer.encode_batch(texts), self)


def join_pairs(
  queries: Sequence[Sequence[int]], texts: Sequence[Sequence[int]], encoder: CrossEncoder
) -> list[list[int]]:
  """Join pairs of token ids with the special tokens of an encoder, cut to its `max_tokens`."""
  first, last = encoder.tokenizer.special["[CLS]"], encoder.tokenizer.special["[SEP]"]
  rows = []
  for query, text in zip(queries, texts, strict=True):
    head = [first, *query[: min(QUERY_TOKENS, encoder.max_tokens // 2)], last]
    rows.append([*head, *text[: encoder.max_tokens - len(head) - 1], last])
  return rows


def load_cross_encoder(source: str | os.PathLike, dtype: str = "auto") -> CrossEncoder:
  """Load a BERT with one output: a folder of transformers or of `configs/rerank.py`, or a name on the hub.

  Raises like `load_encoder`.
  """
  return CrossEncoder(*bert.read_bert(locate_bert(source), computed_in(dtype), labels=1))
