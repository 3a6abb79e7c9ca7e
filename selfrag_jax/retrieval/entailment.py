"""The checker of claims that asks a language model whether the passages say so."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from selfrag_jax.encoders.base import STEP, computed_in
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.likelihood import ending_log_probs
from selfrag_jax.model.pretrained import load_pretrained, without_appended
from selfrag_jax.ragged import pad_rows, round_up
from selfrag_jax.text.chat import find_template, render_for_completion
from selfrag_jax.text.tokenizer import Tokenizer
from selfrag_jax.typing import Params

NOTHING = "(nothing)"
YES, NO = "Yes", "No"


class Entailment:
  """A `Checker` for `check_hallucination`: the odds of "Yes" against "No", from a model without training for it.

  They are divided by the odds of the same claim beside no passage (contextual calibration, arXiv 2102.09690): a model
  that likes to agree, or knows the claim by heart, says nothing about the passages.
  """

  def __init__(self, config: ModelConfig, params: Params, tokenizer: Tokenizer, vocab_size: int, max_tokens: int = 512):
    """Take a model; of each passage at most `max_tokens` are read.

    `vocab_size` is the number of ids that the model was trained on; ids appended later get no probability.
    """
    self.config, self.params = without_appended(config, params, vocab_size)
    self.tokenizer, self.max_tokens, self._template = tokenizer, max_tokens, find_template(tokenizer)

  @classmethod
  def load(cls, model_name: str, dtype: str = "auto", max_tokens: int = 512) -> "Entailment":
    """Load a model that `load_pretrained` takes. Raises ValueError for a model without a tokenizer."""
    found = load_pretrained(model_name, dtype=computed_in(dtype))
    if found.tokenizer is None:
      raise ValueError(f"{model_name} comes without a tokenizer; a judge of texts needs one")
    return cls(found.config, found.params, found.tokenizer, found.base_vocab_size, max_tokens)

  def score(self, claim: str, passages: Sequence[str]) -> float:
    """Return how much likelier "Yes" is beside the best passage than without any, in [0, 1]; 0.5 is no difference.

    A claim without a passage scores 0.
    """
    if not passages:
      return 0.0
    read = [self.tokenizer.decode(self.tokenizer.encode(passage)[: self.max_tokens]) for passage in passages]
    beside = max(self._log_odds(claim, passage) for passage in read)
    return float(1 / (1 + np.exp(self._log_odds(claim, NOTHING) - beside)))

  def _log_odds(self, claim: str, passage: str) -> float:
    asked = f"Passage: {passage}\n\nClaim: {claim}\n\nDoes the passage say that the claim is true? Answer Yes or No."
    if self._template is None:
      prompt, ends = self.tokenizer.encode(f"{asked}\n\nAnswer:"), (f" {YES}", f" {NO}")
    else:
      conversation: Mapping[str, Any] = {"messages": [{"role": "user", "content": asked}]}
      prompt, ends = render_for_completion(self.tokenizer, conversation, self._template), (YES, NO)
    said = [self.tokenizer.encode(end) for end in ends]
    rows = [[*prompt, *end] for end in said]
    tokens, lengths = pad_rows(rows, round_up(max(map(len, rows)), STEP))
    counts, most = np.array([len(end) for end in said]), max(map(len, said))
    yes, no = ending_log_probs(self.config, self.params, tokens, lengths, counts, most=most)[0]
    return float(yes - no)
