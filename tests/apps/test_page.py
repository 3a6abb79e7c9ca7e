"""The web page over the real server, with a tiny random model: what a person does, in a real browser."""

import contextlib
import time

import pytest

from tests import serving
from tests.apps.stand_in import SETTLED, ask
from tests.serving import KEY

LONG = 30_000  # tokens: an answer of so many does not end before a test stops it
LAST = ".turn:last-child"
LETTERS = [{"id": f"d{i}", "title": f"Letter {i}", "content": f"The {i}. tree is a pear."} for i in range(9)]


@pytest.fixture
def start(tmp_path):
  """Start servers of one memory and one knowledge base; each returns its address, and how to end it."""
  places = {
    "memory": str(tmp_path / "memory"),
    "knowledge_bases": [f"letters={serving.build(tmp_path / 'letters', LETTERS)}"],
  }
  with contextlib.ExitStack() as servers:

    def started(keys=(), **settings):
      options = {"kind": "attention", "slots": 2, "context_tokens": 1 << 15, "keys": keys, **places}
      settings = {"max_tokens": LONG, "shutdown_seconds": 1.0, **settings}
      server = servers.enter_context(contextlib.ExitStack())
      address, _ = server.enter_context(serving.running(settings=settings, **options))
      return address, server.close

    yield started


def opened(new_page, address, *size, **options):
  """Open the page of a server, and wait until it has asked what there is."""
  page = new_page(*size, **options)
  page.goto(address)
  page.wait_for_selector("#model:not([hidden])")
  return page


def limit(page, tokens):
  """Set the longest answer."""
  page.click("#open-settings")
  page.fill("#max_tokens", str(tokens))
  page.press("#max_tokens", "Enter")


def test_an_answer_is_streamed_and_can_be_stopped(new_page, start):
  address, _ = start()
  page = opened(new_page, address)
  limit(page, LONG)
  page.fill("#question", "Tell me everything.")
  page.press("#question", "Enter")
  text = page.locator(f"{LAST} .text")
  page.wait_for_selector(f"{LAST} .text:not(:empty)")
  seen = text.text_content()
  while text.text_content() == seen:  # it grows
    time.sleep(0.02)
  assert page.inner_text("#send") == "Stop"
  page.press("#question", "Escape")
  page.wait_for_selector(f"{SETTLED}[data-state=stopped]")
  stopped = text.text_content()
  time.sleep(0.3)
  assert text.text_content() == stopped
  assert page.inner_text("#send") == "Send"
  assert "Stopped." in page.inner_text(f"{LAST} .state")
  page.fill("#question", "And now?")
  page.click("#send")
  page.wait_for_selector(f"{LAST} .text:not(:empty)")
  page.click("#send")  # is the stop button now
  page.wait_for_selector(f"{SETTLED}[data-state=stopped]")


def test_sources_of_an_answer_and_of_a_search(new_page, start):
  address, _ = start()
  page = opened(new_page, address)
  limit(page, 8)
  ask(page, "Which tree is a pear?", "kb:letters", state="done")
  assert page.inner_text(f"{LAST} .sources h3") == "5 passages read, none cited"
  assert page.inner_text(f"{LAST} .title >> nth=0").startswith("Letter ")
  page.click(f"{LAST} .sources summary >> nth=0")
  assert page.inner_text(f"{LAST} .passage >> nth=0").endswith("tree is a pear.")
  page.fill("#question", "tree")
  page.click("#look-up")
  page.wait_for_selector(f"{SETTLED}[data-state=found]")
  assert page.inner_text(f"{LAST} .sources h3") == "5 passages found"
  ask(page, "And without a search?", state="done")
  assert page.is_hidden(f"{LAST} .sources")


def test_the_memory_is_added_to_searched_changed_and_deleted_from(new_page, start):
  address, _ = start()
  page = opened(new_page, address)
  page.click("#open-memory")
  page.wait_for_selector("#memory-status:has-text('Nothing yet.')")
  for text in ("<b>Water</b> the lemon tree.", "Pears keep in a cellar."):
    page.fill("#add-text", text)
    page.fill("#add-source", "a note")
    page.click("#add-form button")
    page.wait_for_selector(f"#memories li:first-child .passage:text-is('{text}')")  # the newest is first
  assert page.inner_text("#memory-status") == "2 texts"
  assert page.locator("#where option").nth(1).text_content() == "Memory (2)"
  page.fill("#recall", "lemon tree")
  page.wait_for_selector("#memory-status:has-text('1 text found')")
  assert page.inner_text("#memories .score").startswith("score 0.")
  page.fill("#recall", "")
  page.wait_for_selector("#memories li:nth-child(2)")
  page.click("#memories li:nth-child(2) .edit")
  page.fill("#memories textarea:visible", "Water it on Sundays.")
  page.click("#memories form:not([hidden]) button[type=submit]")
  page.wait_for_selector(".passage:text-is('Water it on Sundays.')")
  page.click("#memories li:nth-child(1) .delete")
  page.click("#memories li:nth-child(1) .keep")
  page.click("#memories li:nth-child(1) .delete")
  page.click("#memories li:nth-child(1) .danger")
  page.wait_for_selector("#memory-status:has-text('1 text')")
  page.reload()
  page.click("#open-memory")
  page.wait_for_selector("#memories li")
  assert page.locator("#memories .passage").all_inner_texts() == ["Water it on Sundays."]
  limit(page, 8)
  ask(page, "When?", "memory", state="done")
  assert page.inner_text(f"{LAST} .title") == "Water it on Sundays."
  page.click(f"{LAST} .remember")
  page.wait_for_selector("#memories li:nth-child(2)")


def test_a_long_memory_is_shown_in_parts(new_page, start):
  address, _ = start()
  page = opened(new_page, address)
  page.evaluate(
    "(async () => { for (let i = 0; i < 25; i++) await fetch('v1/memory', { method: 'POST', headers: "
    "{ 'Content-Type': 'application/json' }, body: JSON.stringify({ text: `Text ${i}` }) }) })()"
  )
  page.click("#open-memory")
  page.wait_for_selector("#memories li")
  assert page.locator("#memories li").count() == 20
  page.click("#more")
  page.wait_for_selector("#memories li:nth-child(25)")
  assert page.is_hidden("#more")
  texts = page.locator("#memories .passage").all_inner_texts()
  assert texts == [f"Text {i}" for i in range(24, -1, -1)]


def test_the_key_is_asked_for(new_page, start):
  address, _ = start(keys=(KEY,))
  page = new_page()
  page.goto(address)
  page.wait_for_selector("#key:modal")
  page.fill("#key-value", "some-other-key-of-letters")
  page.press("#key-value", "Enter")
  page.wait_for_selector("#key-reason:has-text('does not accept')")
  page.fill("#key-value", KEY)
  page.press("#key-value", "Enter")
  page.wait_for_selector("#model:not([hidden])")
  limit(page, 8)
  ask(page, "Well?", state="done")
  page.reload()
  page.wait_for_selector("#model:not([hidden])")  # kept in the tab


def test_a_server_that_is_busy_says_so(new_page, start):
  address, _ = start(max_waiting=0)
  pages = [opened(new_page, address) for _ in range(3)]  # the engine has two slots
  for page in pages:
    limit(page, LONG)
  for page in pages[:2]:
    page.fill("#question", "Take a while.")
    page.press("#question", "Enter")
    page.wait_for_selector(f"{LAST} .text:not(:empty)")
  ask(pages[2], "Is there room?", state="failed")
  assert "The server has too much to do." in pages[2].inner_text(f"{LAST} .state")
  pages[0].press("#question", "Escape")
  pages[1].press("#question", "Escape")
  pages[2].click(f"{LAST} .retry")
  pages[2].wait_for_selector(f"{LAST} .text:not(:empty)")
  pages[2].press("#question", "Escape")


def test_a_server_that_is_started_again_goes_on(new_page, start):
  address, end = start()
  page = opened(new_page, address)
  limit(page, LONG)
  page.fill("#question", "Tell me everything.")
  page.press("#question", "Enter")
  page.wait_for_selector(f"{LAST} .text:not(:empty)")
  end()
  page.wait_for_selector(f"{SETTLED}[data-state=failed]")
  assert page.inner_text(f"{LAST} .text")  # what came is kept
  page.wait_for_selector("#notice:has-text('Trying again until it answers.')")
  start(port=int(address.rpartition(":")[2]))
  page.wait_for_selector("#notice:has-text('The server is back.')")
  limit(page, 8)
  page.click(f"{LAST} .retry")
  page.wait_for_selector(f"{SETTLED}[data-state=done]")
