"""Variables on the disk: foreign files give readable errors, and scores are numbers."""

import numpy as np
import pytest

import selfrag_jax.textgrad as tg


@pytest.mark.parametrize(
  "content",
  ["[" * 100_000, '{"format": 1, "root": 0, "variables": ' + "[" * 100_000, '{"format": 1, "variables": [5]}'],
)
def test_files_of_other_things_are_no_variables(tmp_path, content):
  (tmp_path / "graph.json").write_text(content)
  with pytest.raises(ValueError, match=r"graph\.json holds no variables"):
    tg.Variable.load(str(tmp_path / "graph.json"))


@pytest.mark.parametrize(("score", "kept"), [(np.float32(0.5), 0.5), (np.int64(3), 3), (float("nan"), None)])
def test_scores_of_numpy_are_kept_in_files(tmp_path, score, kept):
  engine = tg.CallableEngine(lambda content, system: "<IMPROVED_VARIABLE>better</IMPROVED_VARIABLE>")
  prompt = tg.Variable("text", role_description="a text")
  loss = tg.TextLoss("Judge.", engine)(prompt)
  loss.loss_context["score"] = score
  loss.backward(engine)
  loss.save(str(tmp_path / "graph.json"))
  assert tg.Variable.load(str(tmp_path / "graph.json")).loss_context["score"] == kept
  with tg.GradientStore(str(tmp_path / "store")) as store:
    [update] = tg.TGD([prompt], engine=engine, use_gradient_rag=True, gradient_store=store).step()
    assert store.read(update.stored[0]).score in (kept, pytest.approx(score, nan_ok=True))
