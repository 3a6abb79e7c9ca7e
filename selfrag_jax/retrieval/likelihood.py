"""Judges of texts that are language models, and the reranker among them: the likelihood of a query after a passage."""

from collections.abc import Sequence
from typing import Self

import numpy as np

from selfrag_jax.encoders.base import STEP, computed_in
from selfrag_jax.encoders.batches import embed_by_length
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.likelihood import ending_log_probs
from selfrag_jax.model.pretrained import load_pretrained, without_appended
from selfrag_jax.ragged import round_up
from selfrag_jax.retrieval.document import Document
from selfrag_jax.text.tokenizer import Tokenizer
from selfrag_jax.typing import Array, Params


class Judge:
  """A language model that judges texts by the probabilities that it gives them."""

  def __init__(self, config: ModelConfig, params: Params, tokenizer: Tokenizer, vocab_size: int, max_tokens: int = 256):
    """`vocab_size` is the number of ids that the model was trained on; ids appended later get no probability."""
    self.config, self.params = without_appended(config, params, vocab_size)
    self.tokenizer, self.max_tokens = tokenizer, max_tokens

  @classmethod
  def load(cls, model_name: str, dtype: str = "auto", max_tokens: int = 256) -> Self:
    """Load a model that `load_pretrained` takes. Raises ValueError for a model without a tokenizer."""
    found = load_pretrained(model_name, dtype=computed_in(dtype))
    if found.tokenizer is None:
      raise ValueError(f"{model_name} comes without a tokenizer; a judge of texts needs one")
    return cls(found.config, found.params, found.tokenizer, found.base_vocab_size, max_tokens)


class Likelihood(Judge):
  """A reranker that scores a passage by the mean log-likelihood of the query after it (UPR, arXiv 2204.07496)."""

  def __call__(self, query: str, documents: Sequence[Document]) -> np.ndarray:
    """Score documents for a query, f32 [N]."""
    asked = self.tokenizer.encode(f" {query}")
    rows = []
    for document in documents:
      passage = self.tokenizer.encode(f"Passage: {document.text}")[: self.max_tokens]
      rows.append([*passage, *self.tokenizer.encode("\nA question about this passage:"), *asked])

    def read(tokens: np.ndarray, lengths: np.ndarray) -> Array:
      counts = np.minimum(lengths, len(asked))  # none in the rows that only fill a batch
      return ending_log_probs(self.config, self.params, tokens, lengths, counts, most=len(asked))[0][:, None] / len(
        asked
      )

    return embed_by_length(rows, read, 1, lambda n: round_up(n, STEP))[:, 0]
