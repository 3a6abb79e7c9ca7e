"""The reranker that uses a language model: the likelihood of the query after a passage."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from selfrag_jax.encoders.base import STEP, computed_in
from selfrag_jax.encoders.batches import embed_by_length
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.lm import LM
from selfrag_jax.model.pooling import hidden_states
from selfrag_jax.model.pretrained import load_pretrained
from selfrag_jax.ragged import length_mask, round_up
from selfrag_jax.retrieval.document import Document
from selfrag_jax.text.tokenizer import Tokenizer
from selfrag_jax.typing import Array, ArrayLike, Params


class Likelihood:
  """A reranker that scores a passage by the mean log-likelihood of the query after it (UPR, arXiv 2204.07496)."""

  def __init__(self, config: ModelConfig, params: Params, tokenizer: Tokenizer, vocab_size: int, max_tokens: int = 256):
    """`vocab_size` is the number of ids that the model was trained on; ids appended later get no probability."""
    self.config, self.params, self.tokenizer = config, params, tokenizer
    self.vocab_size, self.max_tokens = vocab_size, max_tokens

  @classmethod
  def load(cls, model_name: str, dtype: str = "auto", max_tokens: int = 256) -> "Likelihood":
    """Load a model that `load_pretrained` takes. Raises ValueError for a model without a tokenizer."""
    found = load_pretrained(model_name, dtype=computed_in(dtype))
    if found.tokenizer is None:
      raise ValueError(f"{model_name} comes without a tokenizer; a judge of texts needs one")
    return cls(found.config, found.params, found.tokenizer, found.base_vocab_size, max_tokens)

  def __call__(self, query: str, documents: Sequence[Document]) -> np.ndarray:
    """Score documents for a query, f32 [N]."""
    asked = self.tokenizer.encode(f" {query}")
    rows = []
    for document in documents:
      passage = self.tokenizer.encode(f"Passage: {document.text}")[: self.max_tokens]
      rows.append([*passage, *self.tokenizer.encode("\nA question about this passage:"), *asked])
    read = partial(query_likelihood, self.config, self.params, asked=len(asked), vocab_size=self.vocab_size)
    return embed_by_length(rows, lambda *row: read(*row)[:, None], 1, lambda n: round_up(n, STEP))[:, 0]


@partial(jax.jit, static_argnames=("config", "asked", "vocab_size"))
def query_likelihood(
  config: ModelConfig, params: Params, tokens_BxT: ArrayLike, lengths_B: ArrayLike, *, asked: int, vocab_size: int
) -> Array:
  """Return the mean log-probability of the last `asked` tokens of right-padded rows, f32 [B]."""
  tokens, lengths = jnp.asarray(tokens_BxT), jnp.asarray(lengths_B)
  mask = length_mask(lengths, tokens.shape[1], jnp)
  hidden = hidden_states(config, params, tokens, mask)
  targets = jnp.maximum(lengths[:, None] - asked, 1) + jnp.arange(asked)[None]
  # the head, whose vocabulary is most of the cost, is applied only to the states that predict the query
  before = jnp.take_along_axis(hidden, (targets - 1)[:, :, None], axis=1)
  logits: Any = LM(config).apply(params, before, method="logits")
  logits = logits[..., :vocab_size].astype(jnp.float32)  # half precision would lose small differences
  wanted = jnp.take_along_axis(tokens, targets, axis=1)
  chosen = jnp.take_along_axis(logits, wanted[:, :, None], axis=2)[:, :, 0]
  return jnp.mean(chosen - jax.nn.logsumexp(logits, axis=2), axis=1)
