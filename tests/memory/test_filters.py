"""Filters: they agree with a slow reading of their rules, and a filter on an unknown name is never silent."""

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selfrag_jax.memory.filters import check_where, parse_where, predicate
from selfrag_jax.memory.store import MemoryStore

RECORDS = [
  {"year": 1999, "source": "atlas.md", "tags": ["sea", "port"], "draft": True, "pages": [6, 7]},
  {"year": 2020, "source": "news.md", "tags": ["port"], "draft": False, "pages": ["7"]},
  {"year": 2020.5, "source": "old atlas.md", "tags": [], "date": "2020-05-01", "pages": [8.0]},
  {"year": "2020", "source": "", "tags": "sea", "draft": None},
]

scalars = st.one_of(
  st.none(), st.booleans(), st.integers(-2, 2), st.sampled_from([-1.5, 0.0, 1.0]), st.text("ab", max_size=2)
)
values = st.one_of(scalars, st.lists(scalars, max_size=3))
operands = {
  **dict.fromkeys(("$gt", "$gte", "$lt", "$lte"), st.one_of(st.integers(-2, 2), st.floats(-2, 2), st.text("ab"))),
  "$in": st.lists(scalars, max_size=3),
  "$contains": st.one_of(scalars, st.lists(scalars, max_size=3)),
}
wanted = st.one_of(scalars, st.lists(scalars, max_size=3), st.fixed_dictionaries({}, optional=operands))
names = st.sampled_from(["x", "y"])


def tagged(value):
  """A scalar with what JSON calls it: true and 1 are two things, 1 and 1.0 are one."""
  if value is None or isinstance(value, (bool, str)):
    return type(value).__name__, value
  return "number", float(value)


def slow_fits(metadata, where):
  for name, asked in where.items():
    if name not in metadata:
      return False
    value, own = metadata[name], metadata[name]
    held = {tagged(v) for v in value} if isinstance(value, list) else {tagged(value)}
    conditions = asked if isinstance(asked, dict) and asked else {"$in": asked if isinstance(asked, list) else [asked]}
    if asked == {}:
      return False  # an empty mapping is a value like another, and no record has it
    for sign, operand in conditions.items():
      if sign == "$in":
        ok = any(tagged(option) in held for option in operand)
      elif sign == "$contains":
        options = operand if isinstance(operand, list) else [operand]
        is_part = isinstance(own, str) and any(isinstance(o, str) and own.find(o) >= 0 for o in options)
        ok = is_part or (isinstance(value, list) and any(tagged(o) in held for o in options))
      elif isinstance(value, list) or {tagged(value)[0], tagged(operand)[0]} not in ({"number"}, {"str"}):
        ok = False
      else:
        least, most = sorted([own, operand])
        equal = own == operand
        ok = {"$gt": not equal and most == own, "$gte": most == own, "$lt": not equal and least == own}.get(
          sign, least == own
        )
      if not ok:
        return False
  return True


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(names, values), st.dictionaries(names, wanted))
def test_a_filter_fits_what_its_slow_twin_fits(metadata, where):
  assert predicate(where)(metadata) == slow_fits(metadata, where)


@pytest.mark.parametrize(
  ("where", "found"),
  [
    ({"year": {"$gte": 2000}}, [1, 2]),
    ({"year": {"$gt": 1999, "$lt": 2020.25}}, [1]),
    ({"year": {"$lte": 1999}}, [0]),
    ({"year": 2020}, [1]),  # the text "2020" is no number
    ({"year": {"$gte": "2"}}, [3]),  # and no number is beside texts
    ({"date": {"$gte": "2020-01-01"}}, [2]),
    ({"source": {"$contains": "atlas"}}, [0, 2]),
    ({"tags": {"$contains": "port"}}, [0, 1]),
    ({"tags": {"$contains": "se"}}, [3]),  # a part of a text, but a whole member of a list
    ({"tags": {"$contains": ["se", "port"]}}, [0, 1, 3]),  # one of these
    ({"tags": "port"}, [0, 1]),
    ({"tags": ["port", "sea"]}, [0, 1, 3]),
    ({"source": {"$in": ("news.md", "")}}, [1, 3]),
    ({"source": []}, []),
    ({"draft": True}, [0]),
    ({"draft": 1}, []),
    ({"draft": None}, [3]),
    ({"year": np.int64(2020)}, [1]),
    ({"source": np.array(["news.md"])}, [1]),
    ({"year": {"$gt": 2000}, "source": "news.md"}, [1]),
    (lambda metadata: metadata["source"] == "", [3]),
    ({}, [0, 1, 2, 3]),
  ],
)
def test_operators_mean_what_they_say(where, found):
  check_where(where, RECORDS)
  fits = predicate(where)
  assert [i for i, record in enumerate(RECORDS) if fits(record)] == found


@pytest.mark.parametrize(
  ("where", "message"),
  [
    ({"yaer": 2020}, "asks for 'yaer', which the metadata lacks; did you mean year"),
    ({"zzz": 1}, "lacks; it has date, draft, pages, source, tags, year"),
    ({"year": {"$gte": 2000, "$lte": 2010}, "sorce": "a"}, "did you mean source"),
    ({"year": {"$gtr": 2000}}, r"unknown operator '\$gtr'; there are \$gt, \$gte, \$lt"),
    ({"year": {"$gt": 1, "max": 3}}, "unknown operator 'max'"),
    ({"$or": [{"year": 1}]}, r"'\$or' is not the name of a value"),
    ({"year": {"$gt": None}}, "compares with a number or a text"),
    ({"year": {"$gt": True}}, "compares with a number or a text"),
    ({"year": {"$gt": float("nan")}}, "compares with a number or a text"),
    ({"year": {"$in": "2020"}}, "give a list"),
    (
      {"source": {"$gt": 3}},
      r"no 'source' can be compared with 3 by \$gt: .*; compare texts with a text",
    ),
    ("source=atlas.md", "give a mapping of names to values, or a function"),
    ([("source", "atlas.md")], "give a mapping"),
  ],
)
def test_what_no_record_can_fit_is_said(where, message):
  with pytest.raises(ValueError, match=message):
    check_where(where, RECORDS)


def test_an_empty_store_has_no_names_to_miss_but_knows_the_operators():
  check_where({"yaer": 2020}, [])
  with pytest.raises(ValueError, match="unknown operator"):
    check_where({"year": {"$gtr": 2000}}, [])


@pytest.mark.parametrize(
  ("written", "found"),
  [
    (["year>=2020"], [1, 2]),
    (["year > 2020"], [2]),
    (["year<2020"], [0]),
    (["year<=2020", "year>1999"], [1]),
    (["year=2020"], [1, 3]),  # a number, or the text
    (['year="2020"'], [3]),
    (['year>="2"'], [3]),
    (["date>2020-04-30"], [2]),
    (["source=atlas.md"], [0]),
    (["source=atlas.md", "year=1999"], [0]),
    (['source=["atlas.md","news.md"]'], [0, 1]),
    (["source="], [3]),
    (["source~atlas"], [0, 2]),
    (["tags~port"], [0, 1]),
    (["tags=port"], [0, 1]),
    (["draft=true"], [0]),
    (["draft=null"], [3]),
    (['"year">2020'], [2]),
    (["pages~7"], [0, 1]),  # a member that is the number or the text
    (['pages~"7"'], [1]),
    (["pages~[7,8]"], [0, 2]),
    (["year~2020"], [3]),  # a part of the text; a number has no parts
  ],
)
def test_a_command_line_writes_the_same_filters(written, found):
  where = parse_where(written)
  check_where(where, RECORDS)
  fits = predicate(where)
  assert [i for i, record in enumerate(RECORDS) if fits(record)] == found


def test_a_quoted_name_may_hold_a_sign_and_a_quoted_value_its_spaces():
  fits = predicate(parse_where(['"a=b"=" c "']))
  assert fits({"a=b": " c "})
  assert not fits({"a=b": "c"})


@pytest.mark.parametrize(
  ("written", "message"),
  [
    (["year"], "write NAME=VALUE"),
    (["=3"], "write NAME=VALUE"),
    (["year!=3"], "write NAME=VALUE"),
    (["", "year=3"], "write NAME=VALUE"),
    (["year=1", "year=2"], "year is given twice with =; one value each"),
    (["year>true"], "compares with a number or a text"),
  ],
)
def test_conditions_that_cannot_be_read_are_named(written, message):
  with pytest.raises(ValueError, match=message):
    parse_where(written)


@settings(max_examples=200, deadline=None)
@given(st.text('ab=<>~!"[]{}\\1 ,\ud800', max_size=12))
def test_any_text_is_a_condition_or_an_error_in_words(text):
  with contextlib.suppress(ValueError):  # and nothing else
    predicate(parse_where([text]))({"a": 1, "b": "x"})


def test_brackets_without_end_are_a_text():
  assert predicate(parse_where(["a=" + "[" * 100_000]))({"a": "[" * 100_000})


def store():
  made = MemoryStore(d_model=2, backend="numpy")
  made.add_many(["a", "b", "c"], np.eye(3, 2) + 1, metadata=[{"year": y, "tags": ["t"]} for y in (1990, 2000, 2010)])
  return made


def test_a_memory_is_searched_and_emptied_by_operators():
  memory = store()
  assert {chunk.text for chunk in memory.search([1, 1], where={"year": {"$gte": 2000}})} == {"b", "c"}
  assert {chunk.text for chunk in memory.search([1, 1], where={"tags": {"$contains": "t"}})} == {"a", "b", "c"}
  for ask in (lambda where: memory.search([1, 1], where=where), lambda where: memory.delete(where=where)):
    with pytest.raises(ValueError, match="did you mean year"):
      ask({"yera": 2000})
    with pytest.raises(ValueError, match="unknown operator"):
      ask({"year": {"$gtt": 2000}})
  assert memory.delete(where={"year": {"$lt": 2005}}) == 2
  assert memory.chunks == ["c"]


def test_a_function_cannot_change_what_it_is_asked_about():
  memory = store()
  with pytest.raises(AttributeError, match="pop"):
    memory.search([1, 1], where=lambda metadata: metadata.pop("year") > 1999)
  assert [each["year"] for each in memory.metadata] == [1990, 2000, 2010]


def test_an_empty_filter_deletes_nothing():
  memory = store()
  with pytest.raises(ValueError, match="delete takes ids or where"):
    memory.delete(where={})
  assert len(memory) == 3


def test_an_empty_memory_finds_nothing_by_any_name():
  memory = MemoryStore(d_model=2, backend="numpy")
  assert memory.search([1, 1], where={"anything": 1}) == []
  with pytest.raises(ValueError, match="unknown operator"):
    memory.search([1, 1], where={"anything": {"$gtt": 1}})


@pytest.mark.parametrize("condition", ["year==2020", "year=>2019", "year=<2019", "title=~x"])
def test_a_condition_with_a_sign_too_many_is_no_text(condition):
  with pytest.raises(ValueError, match="in double quotes"):
    parse_where([condition])
  assert parse_where(['title="=x"']) == {"title": {"$in": ["=x"]}}


def test_an_operator_without_its_dollar_is_named():
  with pytest.raises(ValueError, match=r"did you mean '\$gt'"):
    predicate({"rank": {"gt": 1}})
