"""Records of chunks: a store returns all of a record after a reload, and refuses a bad one before it writes."""

import enum
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from selfrag_jax.memory.records import DEEPEST, Recency
from selfrag_jax.memory.store import MemoryStore

D = 4


def nested(depth, value=1, wrap=lambda x: {"a": x}):
  for _ in range(depth):
    value = wrap(value)
  return value


def files(folder):
  return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def folder(tmp_path):
  with MemoryStore(D, chunk_size=3, path=str(tmp_path / "store"), backend="numpy") as store:
    store.add("first", np.ones(D), metadata={"deep": nested(DEEPEST - 1)})
  return tmp_path / "store"


@pytest.mark.parametrize("wrap", [lambda x: {"a": x}, lambda x: [x], lambda x: (x,)])
@pytest.mark.parametrize("depth", [DEEPEST, 500, 100_000])
def test_metadata_that_is_nested_too_deep_is_refused_before_it_is_logged(folder, depth, wrap):
  with MemoryStore.load(str(folder), backend="numpy") as store:
    before = files(folder)
    for change in (
      lambda: store.add("deep", np.ones(D), metadata={"m": nested(depth, wrap=wrap)}),
      lambda: store.update("0", metadata={"m": nested(depth, wrap=wrap)}),
    ):
      with pytest.raises(ValueError, match=f"nested more than {DEEPEST} deep"):
        change()
    assert files(folder) == before
  with MemoryStore.load(str(folder), backend="numpy") as store:
    assert store.chunks == ["first"]
    assert store.metadata[0]["deep"] == nested(DEEPEST - 1)


def circle():
  value = []
  value.append(value)
  return value


class Colour(enum.StrEnum):
  RED = "red"


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ({"metadata": {"a": {1: 2, "1": 3}}}, "names that are not texts, such as one of type int"),
    ({"metadata": {"a": circle()}}, "nested more than"),
    ({"metadata": {"a": [math.nan]}}, "the number nan"),
    ({"metadata": {"a": -math.inf}}, "the number -inf"),
    ({"metadata": {"a": 10**5000}}, "more than 2048 bits"),
    ({"metadata": {"a": "\ud83d\ude00"}}, "half of a surrogate pair at 0"),
    ({"metadata": {"a\udcff": 1}}, "half of a surrogate pair at 1"),
    ({"metadata": {"a": b"bytes"}}, "JSON has no bytes"),
    ({"metadata": {"a": {1, 2}}}, "JSON has no set"),
    ({"metadata": {"a": [{"b": {1, 2}}]}}, "JSON has no set"),
    ({"metadata": {"a": [{"b": np.int64(3)}]}}, "JSON has no int64"),
    ({"metadata": {"a": {"b": {None: 1}}}}, "names that are not texts, such as one of type NoneType"),
    ({"metadata": {5: 1}}, "names that are not texts, such as one of type int"),
    ({"metadata": "source"}, "metadata of chunk 0 is of type str"),
    ({"text": "a\ud800"}, "the text of chunk 0 has half of a surrogate pair at 1"),
    ({"id": "\ud800"}, "the id of chunk 0 has half"),
    ({"key": "\ud800"}, "the key of chunk 0 has half"),
    ({"token_ids": [-5]}, "chunk 0 has the token id -5; ids of a tokenizer lie between 0 and 2147483647"),
    ({"token_ids": np.array([2**40])}, "chunk 0 has the token id 1099511627776"),
    ({"token_ids": np.array([2**63], np.uint64)}, "chunk 0 has the token id 9223372036854775808"),
    ({"token_ids": [2**31]}, "chunk 0 has the token id 2147483648"),
    ({"token_ids": [10**30]}, "no list of whole numbers"),
    ({"token_ids": [1.0]}, "no list of whole numbers"),
    ({"token_ids": [math.nan]}, "no list of whole numbers"),
    ({"token_ids": [True, False]}, "no list of whole numbers"),
    ({"token_ids": ["1"]}, "no list of whole numbers"),
    ({"token_ids": "123"}, "no list of whole numbers"),
    ({"token_ids": [[1], [2]]}, "no list of whole numbers"),
    ({"token_ids": [[1], [2, 3]]}, "no list of whole numbers"),
    ({"embedding": ["a"] * D}, "must be rows of 4 real numbers.*<U1"),
    ({"embedding": [1j] * D}, "must be rows of 4 real numbers.*complex128"),
    ({"embedding": [None] * D}, "must be rows of 4 real numbers.*object"),
    ({"embedding": np.zeros(D, "datetime64[s]")}, "must be rows of 4 real numbers"),
    ({"embedding": [1, [2, 3], 4, 5]}, "must be rows of 4 real numbers"),
    ({"embedding": [math.inf] * D}, "embedding 0 has NaN or infinity"),
    ({"embedding": [1e300] * D}, "embedding 0 has NaN or infinity"),
    ({"embedding": [1e30] * D}, "embedding 0 is so long that float32 cannot hold its square"),
  ],
)
@pytest.mark.filterwarnings("error")
def test_what_a_file_or_a_model_cannot_take_is_refused_and_nothing_is_written(folder, arguments, message):
  with MemoryStore.load(str(folder), backend="numpy") as store:
    before = files(folder)
    with pytest.raises(ValueError, match=message):
      store.add(**{"text": "new", "embedding": np.ones(D), **arguments})
    assert files(folder) == before
    assert store.size == 1


@pytest.mark.parametrize("name", ["texts", "ids", "keys"])
def test_a_text_is_no_list_of_chunks(folder, name):
  with (
    MemoryStore.load(str(folder), backend="numpy") as store,
    pytest.raises(ValueError, match=f"{name} are str; give a list"),
  ):
    store.add_many(**{"texts": ["a", "b"], "embeddings": np.ones((2, D)), name: "ab"})


def test_kinds_of_numbers_and_texts_come_back_as_json_has_them(folder):
  given = {"c": Colour.RED, "n": np.float64(0.5), "t": (1, (2,)), "s": np.str_("x"), "zero": -0.0, "big": 2**2000}
  with MemoryStore.load(str(folder), backend="numpy") as store:
    store.add("new", np.ones(D), metadata={"m": given}, token_ids=np.array([0, 2**31 - 1], np.uint32))
    expected = {"c": "red", "n": 0.5, "t": [1, [2]], "s": "x", "zero": -0.0, "big": 2**2000}
    assert store.metadata[1]["m"] == expected
    assert {name: type(value) for name, value in store.metadata[1]["m"].items()} == {
      name: type(value) for name, value in expected.items()
    }
  with MemoryStore.load(str(folder), backend="numpy") as store:
    assert store.metadata[1]["m"] == expected
    assert math.copysign(1, store.metadata[1]["m"]["zero"]) == -1
    assert store.token_ids[1].tolist() == [0, 2**31 - 1]


anything = st.recursive(
  st.none()
  | st.booleans()
  | st.integers()
  | st.sampled_from([2**2047, 2**2048, 10**4000])
  | st.floats()
  | st.text(st.characters(), max_size=5)
  | st.sampled_from(["\ud800", "\udcff", "\x00", "\u2028", "\ud83d\ude00"])
  | st.binary(max_size=2),
  lambda inner: (
    st.lists(inner, max_size=3)
    | st.tuples(inner)
    | st.dictionaries(st.text(max_size=3) | st.integers(-1, 2) | st.sampled_from(["1", "\ud800"]), inner, max_size=3)
    | st.tuples(st.just("nested"), st.sampled_from([DEEPEST - 4, DEEPEST + 1, 600]))
  ),
  max_leaves=6,
)


def spelled_out(value):
  """Nest what the strategy only says: hypothesis cannot print it."""
  if isinstance(value, dict):
    return {name: spelled_out(each) for name, each in value.items()}
  if isinstance(value, tuple) and value[:1] == ("nested",):
    return nested(value[1])
  return [spelled_out(each) for each in value] if isinstance(value, list) else value


@settings(max_examples=60, deadline=None)
@given(
  st.text(max_size=5) | st.sampled_from(["\ud800", "a\udcff", "\x00"]),
  st.dictionaries(st.text(max_size=3) | st.integers(0, 2), anything, max_size=3),
  st.none() | st.text(max_size=2),
  st.none() | st.lists(st.integers(-2, 3) | st.sampled_from([2**31 - 1, 2**31, 2**70]) | st.floats(), max_size=4),
)
@example("x", {"a": ("nested", 500)}, None, None)
@example("x", {"a": {1: 2, "1": 3}}, None, [2**40])
def test_a_chunk_is_refused_without_a_trace_or_comes_back_the_same(tmp_path_factory, text, metadata, key, tokens):
  folder = tmp_path_factory.mktemp("fuzz")
  with MemoryStore(D, 10, chunk_size=3, path=str(folder), backend="numpy") as store:
    before = files(folder)
    try:
      store.add(text, np.ones(D), metadata=spelled_out(metadata), key=key, token_ids=tokens)
    except ValueError:
      assert files(folder) == before
      assert store.size == 0
    everything = [vars(chunk) for chunk in (store.get(i) for i in store.ids)]
  for published in (False, True):
    with MemoryStore.load(str(folder), backend="numpy") as again:
      assert [repr(vars(again.get(i))) for i in again.ids] == [repr(chunk) for chunk in everything]
      if not published:
        again.save()


@pytest.mark.parametrize("metadata", [["a"], [{"a": 1}], "ab", [("a", 1)], 5, []])
def test_an_update_takes_one_mapping_of_metadata(folder, metadata):
  with MemoryStore.load(str(folder), backend="numpy") as store:
    before = files(folder)
    with pytest.raises(ValueError, match=f"metadata of chunk '0' is of type {type(metadata).__name__}; give names"):
      store.update("0", metadata=metadata)
    assert files(folder) == before


@pytest.mark.parametrize("weight", [math.nan, math.inf, 1e300, pytest.param(10**400, id="10**400"), "1", None, True])
def test_recency_weighs_something_finite(weight):
  with pytest.raises(ValueError, match=r"the weight of recency is .*; give a finite number"):
    Recency(weight, 1)


def test_a_chunk_may_take_the_id_of_one_that_it_replaces(tmp_path):
  with MemoryStore(d_model=2, backend="numpy", path=str(tmp_path / "store")) as store:
    store.add_many(["a", "b"], np.eye(2), ids=["1", "2"])
    assert store.add_many(["c"], np.ones((1, 2)), ids=["1"], replacing=["1"]) == ["1"]
    with pytest.raises(ValueError, match="'2' of chunk 0 is taken"):
      store.add_many(["d"], np.ones((1, 2)), ids=["2"], replacing=["1"])
  again = MemoryStore.load(str(tmp_path / "store"), backend="numpy", read_only=True)
  assert {id: again.get(id).text for id in again.ids} == {"1": "c", "2": "b"}


@pytest.mark.parametrize("half_life", [0, -1, math.nan, pytest.param(10**400, id="10**400"), "1", None])
def test_recency_halves_after_some_time(half_life):
  with pytest.raises(ValueError, match=r"half_life = .* must be above 0, in the unit of 'timestamp'"):
    Recency(1, half_life)


@pytest.mark.filterwarnings("error")
def test_recency_refuses_ages_that_no_float_holds_and_takes_all_others():
  store = MemoryStore(D, 10, backend="numpy")
  store.add("old", np.ones(D), metadata={"year": -(10**308)})
  store.add("new", np.ones(D), metadata={"year": 1.7e308})
  assert store.search(np.ones(D), recency=Recency(1, 1, "year"))[0].text == "new"
  store.add("odd", np.ones(D), metadata={"year": 10**400})
  with pytest.raises(ValueError, match="recency needs a number 'year' that float64 holds in the metadata of every"):
    store.search(np.ones(D), recency=Recency(1, 1, "year"))


@pytest.mark.parametrize("value", [math.nan, True, "1", [1], np.ones(2), 1j])
def test_a_threshold_is_a_number(value):
  store = MemoryStore(D, 10, backend="numpy")
  with pytest.raises(ValueError, match=r"min_score = .* give a number, or None"):
    store.search(np.ones(D), min_score=value)
