"""Gates that are met, missed, or cannot be read."""

import pytest

from selfrag_jax.reports.thresholds import check_names, missed, parse_gate, parse_gates

REPORT = {"bm25.ndcg@10": 0.75, "conditions": {"memory": {"accuracy": 1.0}}, "name": "x", "lost": float("nan")}


def test_gates_are_met_or_missed():
  gates = [parse_gate("min", text) for text in ("bm25.ndcg@10=0.75", "conditions.memory.accuracy=0.9", "lost=0")]
  assert missed(REPORT, gates) == ["lost is nan, not 0 or more"]
  assert missed(REPORT, [parse_gate("min", "bm25.ndcg@10=0.76")]) == ["bm25.ndcg@10 is 0.75, not 0.76 or more"]


def test_a_bound_from_above_is_kept_or_missed():
  gates = [parse_gate("max", text) for text in ("bm25.ndcg@10=0.75", "conditions.memory.accuracy=1.5", "lost=1")]
  assert missed(REPORT, gates) == ["lost is nan, not 1 or less"]
  assert missed(REPORT, [parse_gate("max", "bm25.ndcg@10=0.74")]) == ["bm25.ndcg@10 is 0.75, not 0.74 or less"]


def test_bounds_that_exclude_each_other_are_refused():
  with pytest.raises(ValueError, match=r"^--min=em=0\.5 and --max=em=0\.4 exclude each other$"):
    parse_gates(["loss=0.9", "em=0.5"], ["loss=1", "em=0.4"])
  assert parse_gates(["em=0.5"], ["em=0.5", "loss=0"]) == [("min", "em", 0.5), ("max", "em", 0.5), ("max", "loss", 0)]


def test_keys_with_dots_are_names_too():
  report = {"files": {"a.b": {"n": 3}}, "x.y": 1}
  assert missed(report, parse_gates(["files.a.b.n=4", "x.y=1"], [])) == ["files.a.b.n is 3, not 4 or more"]


def test_of_many_names_some_are_mentioned():
  with pytest.raises(ValueError, match=r"it has value0, .*, and 80 more$"):
    check_names([parse_gate("min", "quartz=1")], [f"value{i}" for i in range(100)])


def test_a_name_that_no_report_will_have_is_refused_with_the_closest():
  for flag in ("min", "max"):
    check_names([parse_gate(flag, "bm25.ndcg@10=1")], REPORT)
    with pytest.raises(ValueError, match=rf"--{flag}: the report has no bm25\.ndgc@10; did you mean bm25\.ndcg@10\?"):
      check_names([parse_gate(flag, "bm25.ndgc@10=1")], REPORT)


@pytest.mark.parametrize("flag", ["min", "max"])
@pytest.mark.parametrize(
  ("gate", "message"),
  [
    ("bm25", "write NAME=VALUE"),
    ("a=b", "write NAME=VALUE"),
    ("foo", "write NAME=VALUE"),
    ("a=b=c", "write NAME=VALUE"),
    ("a=1=2", "write NAME=VALUE"),
    ("lost=nan", "write NAME=VALUE with a number"),
    ("lost=inf", "write NAME=VALUE with a number"),
    ("=1", "write NAME=VALUE"),
    ("", "write NAME=VALUE"),
    ("conditions.memmory.accuracy=1", r"no conditions\.memmory\.accuracy; did you mean conditions\.memory\.accuracy\?"),
    ("conditions=1", r"no conditions; it has bm25\.ndcg@10, conditions\.memory\.accuracy, lost$"),
    ("name=1", "the report has no name; it has bm25"),
  ],
)
def test_what_cannot_be_compared_is_an_error(flag, gate, message):
  with pytest.raises(ValueError, match=rf"^--{flag}.*{message}"):
    missed(REPORT, [parse_gate(flag, gate)])
