"""The store of critiques: they are found by the sample that they criticised, counted, and evicted."""

import pickle

import numpy as np
import pytest

import selfrag_jax.textgrad as tg
from selfrag_jax.encoders.hashed_words import HashingEncoder

ROLE = "system prompt"


def critique(i, text=None, **options):
  return tg.Critique(
    role=ROLE, text=text or f"remark{i} about{i}", sample=f"question{i} asks{i} this{i}", step=i, **options
  )


def find(store, i, k=1, **options):
  return store.search(store.embed([critique(i, text="unseen")]), k, **options)[0]


def test_found_by_the_sample_with_all_its_fields(tmp_path):
  full = critique(3, output="o", target="t", score=0.5, run="r", epoch=2, value_hash="abc")
  with tg.GradientStore(str(tmp_path / "s")) as store:
    store.add([critique(i) for i in range(3)])
    (id,) = store.add([full])
    assert store.read(id) == full
    assert find(store, 3)[0].id == id
    assert find(store, 3)[0].text == full.text
  with tg.GradientStore(str(tmp_path / "s")) as store:
    assert len(store) == 4
    assert store.read(id) == full
    assert find(store, 3)[0].read() == full


def test_sample_weight():
  a, b = tg.Critique(ROLE, "alpha beta", "gamma delta"), tg.Critique(ROLE, "gamma delta", "alpha beta")
  query = tg.Critique(ROLE, "gamma delta", "gamma delta")
  for weight, first in ((1.0, a), (0.0, b)):
    store = tg.GradientStore(sample_weight=weight)
    store.add([a, b])
    assert store.search(store.embed([query]), 1)[0][0].read() == first
  with pytest.raises(ValueError, match="sample_weight"):
    tg.GradientStore(sample_weight=2)


def test_a_folder_can_be_searched_by_another_key(tmp_path):
  a, b = tg.Critique(ROLE, "alpha beta", "gamma delta"), tg.Critique(ROLE, "gamma delta", "alpha beta")
  with tg.GradientStore(str(tmp_path / "s"), sample_weight=0.0) as store:
    store.add([a, b])
  for weight, first in ((1.0, a), (0.0, b)):
    with tg.GradientStore(str(tmp_path / "s"), sample_weight=weight) as store:
      query = store.embed([tg.Critique(ROLE, "gamma delta", "gamma delta")])
      assert store.search(query, 1)[0][0].read() == first


def test_near_duplicates_are_counted():
  store = tg.GradientStore()
  first = store.add([critique(1)])
  assert store.add([critique(1), critique(1)]) == first * 2
  assert len(store) == 1
  assert find(store, 1)[0].count == 3
  assert len(store.add([critique(1, text="something else entirely")])) == 1
  assert len(store) == 2


def test_roles_are_kept_apart():
  store = tg.GradientStore()
  store.add([tg.Critique("other", f"remark {i}", "question1 asks1 this1") for i in range(40)])
  store.add([critique(1)])
  assert [c.read().role for c in find(store, 1, k=3, role=ROLE)] == [ROLE]
  assert len(find(store, 1, k=3, role="other")) == 3


def test_the_same_said_of_two_texts_is_kept_for_each():
  store = tg.GradientStore()
  same = {"text": "say why", "sample": "how many apples?"}
  store.add([tg.Critique(ROLE, **same), tg.Critique("other", **same), tg.Critique("other", **same)])
  store.add([tg.Critique(ROLE, **same)])
  for role in (ROLE, "other"):
    (found,) = store.search(store.embed([tg.Critique(role, **same)]), 5, role=role)[0]
    assert (found.read().role, found.count) == (role, 2)


def test_a_second_run_is_not_given_up_for_being_young():
  store = tg.GradientStore(max_records=40, dedupe_threshold=None)
  for i in range(40):
    store.add([tg.Critique(ROLE, f"old{i}", f"sample{i}", run="a", step=1000 + i)])
  for i in range(10):
    store.add([tg.Critique(ROLE, f"new{i}", f"case{i}", run="b", step=i)])
  assert [c.read().text for c in store.recent(10, role=ROLE)] == [f"new{i}" for i in reversed(range(10))]


def test_a_step_that_was_stopped_is_forgotten(tmp_path):
  said = [tg.Critique(ROLE, f"remark{run}{i}", f"case{run}{i}", run=run, step=i) for run in "ab" for i in range(4)]
  with tg.GradientStore(str(tmp_path / "s")) as store:
    store.add(said)
    store.forget("a", 2)
    assert sorted((c.run, c.step) for c in store.recent(64, role=ROLE)) == [("a", 0), ("a", 1)] + [
      ("b", i) for i in range(4)
    ]
    assert all(c.run == "b" for c in store.search(store.embed(said[2:3]), 8)[0] if c.step >= 2)
    store.add(said[2:3])
  with tg.GradientStore(str(tmp_path / "s")) as store:
    assert [(c.run, c.step) for c in store.recent(2, role=ROLE)] == [("a", 2), ("b", 3)]


def test_what_is_said_again_keeps_its_place(tmp_path):
  with tg.GradientStore(str(tmp_path / "s")) as store:
    ids = [store.add([critique(i)])[0] for i in (1, 2, 1)]
    live = [c.id for c in store.recent(5, role=ROLE)]
  with tg.GradientStore(str(tmp_path / "s")) as store:
    assert [c.id for c in store.recent(5, role=ROLE)] == live == [ids[1], ids[0]]


def test_a_folder_asks_for_the_name_of_its_encoder(tmp_path):
  with pytest.raises(ValueError, match="encoder_name"):
    tg.GradientStore(str(tmp_path / "s"), encoder=lambda texts: np.ones((len(texts), 2), np.float32))
  assert not (tmp_path / "s").exists()


def test_recent_is_by_time_and_not_by_use(tmp_path):
  with tg.GradientStore(str(tmp_path / "s")) as store:
    ids = [store.add([critique(i)])[0] for i in range(5)]
    store.note_use(ids[:2], helped=True)
    assert [c.id for c in store.recent(2, role=ROLE)] == [ids[4], ids[3]]
  with tg.GradientStore(str(tmp_path / "s")) as store:
    assert [c.id for c in store.recent(2, role=ROLE)] == [ids[4], ids[3]]
    assert store.recent(2, role="other") == []


def test_outcomes_and_uses_are_kept(tmp_path):
  with tg.GradientStore(str(tmp_path / "s")) as store:
    ids = store.add([critique(1)])
    store.note_outcome(ids, accepted=False, delta=-0.1)
    store.note_use([*ids, "gone"], helped=True)
  with tg.GradientStore(str(tmp_path / "s")) as store:
    (found,) = find(store, 1)
    assert (found.accepted, found.delta, found.uses, found.helped) == (False, -0.1, 1, 1)


def test_full_store_gives_up_what_helped_least():
  store = tg.GradientStore(max_records=40, dedupe_threshold=None)
  ids = [store.add([critique(i)])[0] for i in range(40)]
  store.note_outcome(ids[:3], accepted=True, delta=0.1)
  store.note_outcome(ids[37:], accepted=False, delta=-0.1)
  store.note_use(ids[3:6], helped=True)
  for i in range(40, 60):
    store.add([critique(i)])
  assert len(store) <= 40
  kept = {store.read(c.id).step for c in store.recent(64, role=ROLE)}
  assert {0, 1, 2, 3, 4, 5, 59} <= kept
  assert not kept & {37, 38, 39}


def test_more_than_fit_at_once_are_refused():
  store = tg.GradientStore(max_records=3)
  with pytest.raises(ValueError, match=r"4 critiques at once .* max_records=3"):
    store.add([critique(i) for i in range(4)])
  assert len(store) == 0
  assert len(store.add([critique(i) for i in range(3)])) == 3


def test_other_encoder_is_refused(tmp_path):
  path = str(tmp_path / "s")
  tg.GradientStore(path).close()
  with pytest.raises(tg.GradientStoreError, match=r"hashing-1024-2-0.5 of width 1024.*hashing-64-2-0.5 of width 64"):
    tg.GradientStore(path, encoder=HashingEncoder(64))


def test_a_folder_goes_on_with_the_hashed_words_that_it_was_made_with(tmp_path):
  earlier = HashingEncoder(256, copies=4, pair_weight=1.0)  # the default of folders that are named hashing-256
  with tg.GradientStore(str(tmp_path / "s"), encoder=earlier) as store:
    assert '"hashing-256"' in (tmp_path / "s" / "gradient_store.json").read_text()
    store.add([critique(i) for i in range(3)])
    expected = store.embed([critique(1)])
  with tg.GradientStore(str(tmp_path / "s")) as store:
    np.testing.assert_array_equal(store.embed([critique(1)]), expected)
    assert find(store, 1)[0].read() == critique(1)
    store.add([critique(3)])
  with pytest.raises(tg.GradientStoreError, match=r"hashing-256 of width 256.*hashing-1024-2-0.5 of width 1024"):
    tg.GradientStore(str(tmp_path / "s"), encoder=HashingEncoder())


def test_other_folders_are_refused(tmp_path):
  (tmp_path / "note.txt").write_text("mine")
  with pytest.raises(tg.GradientStoreError, match="no gradient store"):
    tg.GradientStore(str(tmp_path))
  with pytest.raises(tg.GradientStoreError, match="no gradient store"):
    tg.GradientStore(str(tmp_path / "new"), read_only=True)
  assert not (tmp_path / "new").exists()


def test_version_is_checked(tmp_path):
  path = tmp_path / "s"
  tg.GradientStore(str(path)).close()
  manifest = path / "gradient_store.json"
  manifest.write_text(manifest.read_text().replace('"format": 3', '"format": 9'))
  with pytest.raises(tg.GradientStoreError, match="format 9"):
    tg.GradientStore(str(path))


def test_hashing_encoder():
  encoder = HashingEncoder()
  a, b, c, d = encoder(["Count the apples", "count the APPLES!", "translate a letter", ""])
  assert a @ b > 0.9 > 0.3 > a @ c
  assert not d.any()
  assert np.linalg.norm(a) == pytest.approx(1, abs=1e-6)
  np.testing.assert_array_equal(encoder(["same text"]), HashingEncoder()(["same text"]))


@pytest.mark.parametrize("settings", [(), (256, 4, 1.0), (16, 1, 0.0), (99, 12, 0.125), (8, 4, 1), (300, 2, 1.0)])
def test_the_name_of_an_encoder_says_how_it_hashes(settings):
  encoder = HashingEncoder(*settings)
  again = HashingEncoder.named(encoder.name)
  assert again is not None
  assert again.name == encoder.name
  texts = ["one two three", "three two one", "a", ""]
  np.testing.assert_array_equal(again(texts), encoder(texts))


@pytest.mark.parametrize(
  "name", ["MiniLM", "hashing-", "hashing-0", "hashing-8-2", "hashing-8-2-5", "hashing-1e9", "x"]
)
def test_other_names_are_no_hashing_encoders(name):
  assert HashingEncoder.named(name) is None


def test_pairs_of_words_weigh_as_much_as_was_asked_for():
  for weight, are_same in ((0.0, True), (0.5, False)):
    a, b = HashingEncoder(pair_weight=weight)(["one two three", "three one two"])
    assert np.allclose(a, b) == are_same


@pytest.mark.parametrize("bad", [{"width": 0}, {"copies": 0}, {"pair_weight": 1.5}, {"pair_weight": -1}])
def test_what_no_encoder_can_do_is_refused(bad):
  with pytest.raises(ValueError, match=next(iter(bad))):
    HashingEncoder(**bad)


def test_nothing_is_pickled_or_unpickled(tmp_path, monkeypatch):
  def forbidden(*_, **__):
    raise AssertionError("pickle was used")

  for name in ("load", "loads", "dump", "dumps", "Pickler", "Unpickler"):
    monkeypatch.setattr(pickle, name, forbidden)
  with tg.GradientStore(str(tmp_path / "s")) as store:
    ids = store.add([critique(1)])
    store.note_outcome(ids, accepted=True, delta=0.1)
  with tg.GradientStore(str(tmp_path / "s")) as store:
    assert find(store, 1)[0].read() == critique(1)
