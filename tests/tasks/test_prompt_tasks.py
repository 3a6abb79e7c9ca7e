"""Tasks for prompt optimizers from damaged files."""

import pytest

from selfrag_jax.tasks.prompt_tasks import make_task


@pytest.mark.parametrize(
  "line", ['{"question": "q", "answer": ["#### 5"]}', '{"question": 5, "answer": "#### 5"}', '{"question": "q"}']
)
def test_lines_of_gsm8k_are_texts(tmp_path, line):
  (tmp_path / "bad.jsonl").write_text('{"question": "q", "answer": "#### 5"}\n' + line)
  section = {"name": "gsm8k", "path": str(tmp_path / "bad.jsonl"), "sizes": {"test": 1}, "calls": 1}
  with pytest.raises(ValueError, match=r"bad\.jsonl, line 2: a line of GSM8K"):
    make_task(section, 0)
