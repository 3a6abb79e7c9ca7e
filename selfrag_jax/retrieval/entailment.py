"""The checker of claims that asks a language model whether the passages say so."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from selfrag_jax.encoders.base import STEP
from selfrag_jax.model.likelihood import ending_log_probs
from selfrag_jax.ragged import pad_rows, round_up
from selfrag_jax.retrieval.likelihood import Judge
from selfrag_jax.text.chat import find_template, render_for_completion

NOTHING = "(nothing)"
YES, NO = "Yes", "No"


class Entailment(Judge):
  """A `Checker` for `check_hallucination`: the odds of "Yes" against "No", from a model without training for it.

  They are divided by the odds of the same claim beside no passage (contextual calibration, arXiv 2102.09690): a model
  that likes to agree, or knows the claim by heart, says nothing about the passages. Of each passage at most
  `max_tokens` are read.
  """

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
    if (template := find_template(self.tokenizer)) is None:
      prompt, ends = self.tokenizer.encode(f"{asked}\n\nAnswer:"), (f" {YES}", f" {NO}")
    else:
      conversation: Mapping[str, Any] = {"messages": [{"role": "user", "content": asked}]}
      prompt, ends = render_for_completion(self.tokenizer, conversation, template), (YES, NO)
    said = [self.tokenizer.encode(end) for end in ends]
    rows = [[*prompt, *end] for end in said]
    tokens, lengths = pad_rows(rows, round_up(max(map(len, rows)), STEP))
    counts, most = np.array([len(end) for end in said]), max(map(len, said))
    yes, no = ending_log_probs(self.config, self.params, tokens, lengths, counts, most=most)[0]
    return float(yes - no)
