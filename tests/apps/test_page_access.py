"""The web page for everybody: by keyboard alone, for screen readers, in narrow windows, in both colour schemes."""

import pytest

from tests.apps.stand_in import answer, ask, source

CITED = answer("It is so [1].\n\n```\nx = 1\n```", [source(1, is_cited=True), source(2, title="", source="long/" * 40)])
NOISE = "An unusually long word: " + "x" * 300


def active(page):
  """Return the id or the class of the element with the focus."""
  return page.evaluate("document.activeElement.id || document.activeElement.className")


def tab_to(page, wanted, limit=40):
  """Press Tab until an element has the focus."""
  for _ in range(limit):
    page.keyboard.press("Tab")
    if wanted in active(page).split():
      return
  raise AssertionError(f"Tab does not reach {wanted}")


def show_everything(page, stand_in):
  """Fill the page: an answer with sources, one that failed, a notice, the memory with an editor and a question."""
  stand_in.reply("POST", "/v1/chat/completions", CITED)
  ask(page, NOISE, "kb:letters")
  page.click(".citation")
  stand_in.refuse("POST", "/v1/chat/completions", 429)
  ask(page, "Again?", "memory", state="failed")
  page.click("#open-memory")
  page.click("#memories li:nth-child(1) .edit")
  page.click("#memories li:nth-child(2) .delete")
  page.click("#add summary")


@pytest.mark.parametrize("is_dark", [False, True])
@pytest.mark.parametrize("size", [(1280, 800), (320, 640)])
def test_axe_finds_nothing(open_page, stand_in, size, is_dark):
  """No rule of WCAG 2.2 A and AA, and no best practice, that axe-core can check is broken, in any state."""
  axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="pip install -e '.[test]'").Axe()
  # axe itself builds markup from strings, which the page's policy forbids
  page = open_page(*size, is_dark=is_dark, bypass_csp=True)

  def check(state):
    violations = axe.run(page).response["violations"]
    told = [f"{state}: {found['id']}: {node['html'][:200]}" for found in violations for node in found["nodes"]]
    assert told == []

  check("empty")
  show_everything(page, stand_in)
  check("memory")
  page.click("#close-memory")
  check("answers")
  page.click("#new-chat")
  check("notice")
  page.click("#open-settings")
  check("settings")
  page.click("#change-key")
  check("key")


@pytest.mark.parametrize("size", [(320, 640), (640, 400), (320, 256), (768, 1024)])
def test_a_small_window_never_scrolls_sideways(open_page, stand_in, size):
  """Down to 320 pixels, at 200% zoom of 1280 x 800 (640 x 400), and at 400% of 1280 x 1024 (320 x 256)."""
  page = open_page(*size)

  def check():
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]

  check()
  show_everything(page, stand_in)
  assert page.evaluate("document.getElementById('memory').scrollWidth") <= size[0]
  page.click("#close-memory")
  check()
  page.click("#open-settings")
  box = page.locator("#settings").bounding_box()
  assert box["x"] >= 0
  assert box["x"] + box["width"] <= size[0]
  page.locator("#settings-form button[type=submit]").scroll_into_view_if_needed()
  page.click("#settings-form button[type=submit]")
  page.fill("#question", "Still there?")  # the field can be reached
  page.click("#send")


def test_everything_is_done_by_keyboard(open_page, stand_in):
  stand_in.reply("POST", "/v1/chat/completions", CITED)
  page = open_page()
  keys = page.keyboard
  assert active(page) == "question"
  keys.type("One line")
  keys.press("Shift+Enter")
  keys.type("and another")
  tab_to(page, "where")
  keys.type("letters")
  keys.press("Shift+Tab")
  keys.press("Enter")
  page.wait_for_selector("[data-state=done]")
  assert page.text_content(".asked") == "One line\nand another"
  assert stand_in.bodies("/v1/chat/completions")[0]["knowledge_base"] == "letters"
  assert active(page) == "question"

  tab_to(page, "skip")  # behind the last control, from the beginning again
  tab_to(page, "citation")
  keys.press("Enter")
  assert page.locator(".sources details").first.get_attribute("open") is not None
  assert page.evaluate("document.activeElement.tagName") == "SUMMARY"

  tab_to(page, "open-memory")
  keys.press("Enter")
  page.wait_for_selector("#memories li")
  assert active(page) == "recall"
  assert page.get_attribute("#open-memory", "aria-expanded") == "true"
  tab_to(page, "delete")
  keys.press("Enter")
  assert "keep" in active(page)
  keys.press("Escape")  # of the question, not of the panel
  assert "delete" in active(page)
  assert page.is_visible("#memory")
  keys.press("Escape")
  assert page.is_hidden("#memory")
  assert active(page) == "open-memory"

  tab_to(page, "open-settings")
  keys.press("Enter")
  assert active(page) == "temperature"
  keys.press("Escape")
  assert active(page) == "open-settings"
  tab_to(page, "again")
  keys.press("Enter")
  assert active(page) == "question"


def test_what_has_the_focus_is_seen(open_page, stand_in):
  """Nothing that Tab reaches lies under the bar at the top or the question field, and it has a visible outline."""
  stand_in.reply("POST", "/v1/chat/completions", answer("Word. " * 600 + "[1]", [source(n) for n in range(1, 9)]))
  page = open_page(800, 500)
  ask(page, "A long one?", "kb:letters")
  ask(page, "And another?", "kb:letters")
  page.evaluate("document.querySelector('.skip').focus()")
  seen = []
  for _ in range(60):
    page.keyboard.press("Tab")
    seen.append(active(page))
    if active(page) == "question":
      break
    outline, hit = page.evaluate(
      """(() => {
        const focused = document.activeElement, box = focused.getBoundingClientRect();
        const top = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);
        return [getComputedStyle(focused).outlineStyle, focused.contains(top)];
      })()"""
    )
    assert outline == "solid", active(page)
    assert hit, active(page)
  assert "question" in seen
  assert len(seen) > 15


def test_the_memory_is_a_sheet_over_a_narrow_chat(open_page):
  page = open_page(400, 800)
  page.click("#open-memory")
  assert page.locator("#memory:modal").count() == 1
  page.set_viewport_size({"width": 1280, "height": 800})
  page.wait_for_selector("#memory:not(:modal)")  # beside the chat
  assert page.get_attribute("#open-memory", "aria-expanded") == "true"
  page.set_viewport_size({"width": 400, "height": 800})
  page.wait_for_selector("#memory:modal")
  page.keyboard.press("Escape")
  page.wait_for_selector("#memory", state="hidden")
  assert active(page) == "open-memory"


def test_screen_readers_are_given_whole_answers(open_page, stand_in):
  stand_in.reply("POST", "/v1/chat/completions", answer("word " * 200 + "[1].", [source(1, is_cited=True)]))
  page = open_page()
  page.evaluate(
    "(() => { window.said = []; new MutationObserver((all) => all.forEach(({ addedNodes }) => "
    "addedNodes.forEach((node) => said.push(node.textContent)))).observe(announcer, { childList: true }) })()"
  )
  ask(page, "Well?", "kb:letters")
  said = page.evaluate("said")
  assert len(said) == 1  # 200 tokens, and one message
  assert said[0].startswith("word word")
  assert said[0].endswith("1 passage read, 1 cited")
  assert page.get_attribute("#announcer", "aria-live") == "polite"
  assert page.locator("main, header.bar, nav").count() == 3
