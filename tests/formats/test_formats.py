"""Files of earlier versions: they can be opened, have their old content, and can be written to."""

import tarfile
from pathlib import Path

import make_formats as make  # beside this file
import numpy as np
import pytest

import selfrag_jax.textgrad as tg
from selfrag_jax.memory.store import MemoryStore
from selfrag_jax.retrieval.base import load
from selfrag_jax.retrieval.document import Document
from selfrag_jax.retrieval.knowledge_base import prepare_knowledge_base

HERE = Path(__file__).parent
TEXTS = make.TEXTS


@pytest.fixture(scope="module", params=sorted(path.name for path in HERE.glob("*.tar.gz")))
def folder(request, tmp_path_factory):
  path = tmp_path_factory.mktemp("formats")
  with tarfile.open(HERE / request.param) as archive:
    archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.2, Debian's, has none
    archive.extractall(path)
  return path


def test_a_memory(folder):
  kept = [TEXTS[0], *TEXTS[2:], "one more"]
  with MemoryStore.load(str(folder / "memory"), encoder=make.lengths) as store:
    assert store.chunks == kept
    assert store.ids[-1] == "mine"
    assert store.settings["max_chunks"] == 6
    np.testing.assert_array_equal(store.embeddings, make.lengths(kept))
    assert [list(ids) for ids in store.token_ids] == [[0, 1], [2, 3], [3, 4], [7]]
    assert [facts.get("n") for facts in store.metadata] == [0, 2, 3, None]
    assert [chunk.text for chunk in store.search(TEXTS[2], k=1)] == [TEXTS[2]]
    store.add("later")
  with MemoryStore.load(str(folder / "memory"), read_only=True) as store:
    assert store.chunks == [*kept, "later"]


def test_knowledge_bases(folder):
  hybrid = load(folder / "kb_hybrid")
  assert hybrid.documents == make.documents()
  assert [part.name for part in hybrid.parts] == ["bm25", "simple", "dense"]
  found = hybrid.retrieve("ships", 1)[0]
  assert found.id == "d3"
  assert {part["rank"] for part in found.components} == {1}
  hybrid.add_documents([Document("later", content="a late one")])
  hybrid.save(folder / "kb_hybrid")
  assert len(load(folder / "kb_hybrid")) == 5
  report = prepare_knowledge_base(folder / "texts.jsonl", folder / "kb_built", sync=True, progress=False)
  assert (report["documents"], report["embedded"], report["removed"]) == (4, 0, 0)  # the file is what it was


def test_a_store_of_critiques(folder):
  with tg.GradientStore(
    str(folder / "critiques"), encoder=make.lengths, encoder_name=make.ENCODED, dedupe_threshold=None
  ) as store:
    past = sorted(store.recent(4, role="prompt"), key=lambda critique: critique.step)
    assert [critique.text for critique in past] == list(TEXTS)
    assert [(critique.uses, critique.helped) for critique in past] == [(1, 1), (1, 1), (0, 0), (0, 0)]
    assert [critique.accepted for critique in past] == [None, None, False, None]
    assert past[2].delta == -0.5
    store.add([tg.Critique(role="prompt", text="later")])
  assert tg.EngineCache(str(folder / "answers.sqlite")).get("a key") == "an answer"
  variable = tg.Variable.load(str(folder / "variable.json"))
  assert variable.value == "be brief"
  assert [critique.value for critique in variable.gradients] == ["say why"]


def test_checkpoints_and_exports(folder):
  found = make.answers(folder)
  with np.load(folder / "answers.npz", allow_pickle=False) as expected:
    assert found.keys() == set(expected)
    for name, values in found.items():
      np.testing.assert_allclose(values, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)
