"""The page of rollouts: every search is there, hostile text stays text, unchanged questions can be hidden."""

from selfrag_jax.reports.rollouts_page import write_rollouts

HOSTILE = "<script>alert(1)</script>"


def rollout(**changes):
  document = {"text": f"Harrow {HOSTILE}", "score": 0.5, "gold": True}
  hops = [{"query": HOSTILE, "documents": [document]}, {"query": "nothing", "documents": []}]
  row = {"policy": "after", "hops": hops, "answer": "Harrow", "reward": 1.0, "advantage": None}
  return row | {"exact": True, "valid": True} | changes


def test_every_search_is_shown_and_text_stays_text(tmp_path):
  changed = {"question": f"Who? {HOSTILE}", "right": ["Harrow", "H."], "changed": True}
  same = {"question": "Which?", "right": ["x"], "changed": False}
  rows = [rollout(), rollout(advantage=-0.5, answer=None, exact=False, valid=False, reward=0.15)]
  write_rollouts(tmp_path / "report.html", "Rollouts", [{**changed, "rollouts": rows}, {**same, "rollouts": rows[:1]}])
  page = (tmp_path / "report.html").read_text()
  assert "<script" not in page
  assert page.count("<section class=changed>") == page.count("<section class=same>") == 1
  assert "2 questions, 1 of them with another greedy rollout" in page
  assert "right: Harrow or H." in page
  assert "greedy, reward 1.00</span>" in page
  assert "advantage -0.50, reward 0.15, format broken</span>" in page
  assert page.count("search 2: <b>nothing</b>") == page.count("nothing was found") == 3
  assert page.count("class=needed") == 3
  assert "answer: no answer" in page
