"""Prompts that endpoints improve: paid answers are kept, and any answer of a model can be written."""

import json

import pytest

import selfrag_jax.textgrad as tg
from selfrag_jax.experiments import gradient_rag
from selfrag_jax.textgrad.endpoint import OpenAIEngine
from selfrag_jax.textgrad.limits import Completion, EngineError


def test_nothing_is_asked_again_that_was_paid_for(tmp_path, behind_endpoints, monkeypatch):
  asked, failures = [], iter([True, False, True])

  def complete(self, content, system_prompt, **sampling):
    is_optimizer = "<IMPROVED_VARIABLE>" in (system_prompt or "")
    if is_optimizer and next(failures, False):
      raise EngineError("gone")
    asked.append((content, system_prompt))
    text = f"<IMPROVED_VARIABLE>Version {len(asked)}.</IMPROVED_VARIABLE>" if is_optimizer else "Answer: 7"
    return Completion(text, 1, 1)

  monkeypatch.setattr(OpenAIEngine, "complete", complete)
  behind_endpoints["optimizer"]["steps"] = 3
  (tmp_path / "run").mkdir()
  run = lambda: gradient_rag.run(gradient_rag.build(behind_endpoints), tmp_path / "run")
  for _ in range(2):
    with pytest.raises(EngineError, match="gone"):
      run()
  report = run()
  assert len(asked) == len(set(asked)) == report["account"]["calls"]
  assert report["account"]["cached_calls"] > 0


def test_engines_behind_endpoints(behind_endpoints):
  made = behind_endpoints
  experiment = gradient_rag.build(made)
  assert all(isinstance(engine, OpenAIEngine) for engine in experiment.engines.values())
  assert experiment.engines["critic"].context_tokens == 32_768
  assert {part: len(samples) for part, samples in experiment.task.parts.items()} == {
    "train": 100,
    "valid": 50,
    "test": 100,
  }
  texts = [sample.text for samples in experiment.task.parts.values() for sample in samples]
  assert len(set(texts)) == 250
  made["engines"]["model"]["name"], made["engines"]["model"]["base_url"] = "scripted", ""
  with pytest.raises(ValueError, match="no script"):
    gradient_rag.build(made)


def test_cases_with_half_surrogate_pairs_are_asked_and_written(tmp_path, monkeypatch, behind_endpoints):
  file = tmp_path / "odd.json"
  file.write_text(json.dumps({"examples": [{"input": f"{i} \ud800", "target": f"{i}"} for i in range(30)]}))
  behind_endpoints["task"] |= {"path": str(file), "sizes": {"train": 10, "valid": 10, "test": 10}}
  behind_endpoints["optimizer"]["steps"] = 2
  asked = []
  complete = lambda self, content, system, **sampling: asked.append(content) or Completion("\udfff 7", 1, 1)
  monkeypatch.setattr(OpenAIEngine, "complete", complete)
  (tmp_path / "run").mkdir()
  gradient_rag.run(gradient_rag.build(behind_endpoints), tmp_path / "run")
  assert "".join(asked).encode()
  assert (tmp_path / "run" / "report.html").exists()
  file.write_text(json.dumps({"examples": [{"input": 5, "target": "x"}] * 30}))
  with pytest.raises(ValueError, match="int where text was expected"):
    gradient_rag.build(behind_endpoints)


def test_what_cannot_be_written_is_said(tmp_path, behind_endpoints, monkeypatch):
  behind_endpoints["optimizer"]["steps"] = 1
  monkeypatch.setattr(OpenAIEngine, "complete", lambda *arguments, **options: Completion("x" * 10_000, 5, 5))
  opened = tg.EngineCache._open

  def open_full(self):
    opened(self)
    pages = self._file.execute("PRAGMA page_count").fetchone()[0]
    self._file.execute(f"PRAGMA max_page_count = {pages}")  # as a full disk

  monkeypatch.setattr(tg.EngineCache, "_open", open_full)
  (tmp_path / "run").mkdir()
  with pytest.raises(EngineError, match=r"full; not booked: \d+ answered calls, \d+ tokens"):
    gradient_rag.run(gradient_rag.build(behind_endpoints), tmp_path / "run")
