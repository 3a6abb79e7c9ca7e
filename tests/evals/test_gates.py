"""Gates are met, missed, or cannot be read."""

import pytest

from selfrag_jax.evals.gates import missed, parse_gate

REPORT = {"bm25.ndcg@10": 0.75, "conditions": {"memory": {"accuracy": 1.0}}, "name": "x", "lost": float("nan")}


def test_gates_are_met_or_missed():
  gates = [parse_gate(text) for text in ("bm25.ndcg@10=0.75", "conditions.memory.accuracy=0.9", "lost=0")]
  assert missed(REPORT, gates) == ["lost is nan, not 0 or more"]
  assert missed(REPORT, [parse_gate("bm25.ndcg@10=0.76")]) == ["bm25.ndcg@10 is 0.75, not 0.76 or more"]


@pytest.mark.parametrize(
  ("gate", "message"),
  [
    ("bm25", "write NAME=VALUE"),
    ("a=b", "write NAME=VALUE"),
    ("bm26.ndcg@10=1", "the report has no bm26.ndcg@10; at 'bm26' it has bm25.ndcg@10, conditions"),
    ("conditions.memory.acc=1", "at 'acc' it has accuracy"),
    ("name=1", "name is no number"),
  ],
)
def test_what_cannot_be_compared_is_an_error(gate, message):
  with pytest.raises(ValueError, match=message):
    missed(REPORT, [parse_gate(gate)])
