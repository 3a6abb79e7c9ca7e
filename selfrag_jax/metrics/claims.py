"""Hallucination at the level of claims: the share of the statements of a response that its documents support."""

from collections.abc import Sequence
from typing import Protocol, TypedDict

from selfrag_jax.metrics.citations import extract_citations_from_response
from selfrag_jax.metrics.rule_checker import THRESHOLD, RuleChecker
from selfrag_jax.metrics.sentences import HasText, split_words, texts_of


class Checker(Protocol):
  """A judge of claims."""

  def score(self, claim: str, passages: Sequence[str]) -> float:
    """Return how well the passages support a claim, in [0, 1]; higher is better."""
    ...


class HallucinationReport(TypedDict):
  """How many claims a response makes, how many are supported, their share (0 without claims), and the others."""

  total_facts: int
  verified_facts: int
  verification_rate: float
  potential_hallucinations: list[str]


def check_hallucination(
  response: str, documents: Sequence[str | HasText], checker: Checker | None = None
) -> HallucinationReport:
  """Check each claim of a response, a sentence without its citations, against all documents.

  A claim is verified if the checker's score is at least 0.5; the default is the rule-based `RuleChecker`. Only the
  response is read for claims, and which documents it cites plays no role: `citation_scores` measures that.
  """
  checker, passages = checker or RuleChecker(), texts_of(documents)
  claims = [statement.text for statement in extract_citations_from_response(response) if split_words(statement.text)]
  unsupported = [claim for claim in claims if not checker.score(claim, passages) >= THRESHOLD]  # NaN verifies nothing
  verified = len(claims) - len(unsupported)
  return {
    "total_facts": len(claims),
    "verified_facts": verified,
    "verification_rate": verified / len(claims) if claims else 0.0,
    "potential_hallucinations": unsupported,
  }
