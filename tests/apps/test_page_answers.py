"""The web page over answers that a test has written: citations, errors, hostile text, what is sent and what is kept."""

import json

import pytest

from tests.apps.stand_in import answer, ask, source, sse

HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script><a href='https://example.com'>x</a>"
LAST = ".turn:last-child"


def test_a_citation_leads_to_its_source(open_page, stand_in):
  sources = [source(1, is_cited=True), source(2), source(3, is_cited=True)]
  stand_in.reply("POST", "/v1/chat/completions", answer("Yes [1]. Also [1, 3] and [7].", sources))
  page = open_page()
  ask(page, "Is it so?", "kb:letters")
  assert page.locator(".text a").all_text_contents() == ["[1]", "1", "3"]  # there is no source 7
  assert page.inner_text(".sources h3") == "3 passages read, 2 cited"
  assert [" ".join(row.split()) for row in page.locator(".sources summary").all_inner_texts()] == [
    "1 Title 1 notes.txt:1 Passage 1. cited score 0.90",
    "2 Title 2 notes.txt:2 Passage 2. not cited score 0.80",
    "3 Title 3 notes.txt:3 Passage 3. cited score 0.70",
  ]
  page.locator(".citation").nth(2).click()
  assert page.locator(".passage").nth(2).is_visible()
  assert page.evaluate("document.activeElement.closest('li').id").endswith("-3")
  assert page.locator(".passage").nth(0).is_hidden()


def test_a_search_shows_passages_and_writes_nothing(open_page, stand_in):
  stand_in.reply("POST", "/v1/search", {"data": [source(1), source(2)]})
  page = open_page()
  assert page.is_hidden("#look-up")  # there is nothing to search
  page.select_option("#where", "memory")
  page.fill("#question", "lemons")
  page.click("#look-up")
  page.wait_for_selector(f"{LAST}[data-state=found]")
  assert page.inner_text(".sources h3") == "2 passages found"
  assert stand_in.bodies("/v1/search") == [{"query": "lemons", "top_k": 5, "memory": True}]
  assert stand_in.bodies("/v1/chat/completions") == []


def test_settings_and_earlier_answers_are_sent(open_page, stand_in):
  page = open_page()
  ask(page, "One?")
  page.click("#open-settings")
  for field, value in {"#temperature": "0.7", "#max_tokens": "9", "#top_k": "3", "#seed": "42"}.items():
    page.fill(field, value)
  page.click("#settings-form button[type=submit]")
  stand_in.refuse("POST", "/v1/chat/completions", 400, "no")
  ask(page, "Two?", state="failed")
  stand_in.reply("POST", "/v1/chat/completions", answer("Three.", [source(1)], "length"))
  ask(page, "Three?", "kb:letters")
  first, _, third = stand_in.bodies("/v1/chat/completions")
  question = {"role": "user", "content": "One?"}
  assert first == {"model": "tiny", "messages": [question], "temperature": 0, "stream": True}
  assert third == {
    "model": "tiny",
    # what was not answered is left out
    "messages": [question, {"role": "assistant", "content": "Hello there."}, {"role": "user", "content": "Three?"}],
    **{"temperature": 0.7, "max_tokens": 9, "top_k": 3, "seed": 42, "knowledge_base": "letters", "stream": True},
  }
  assert "at the longest length" in page.inner_text(f"{LAST} .state")


def test_a_conversation_survives_a_reload_and_a_new_chat_can_be_undone(open_page):
  page = open_page()
  ask(page, "One?")
  page.fill("#question", "half a thought")
  page.reload()
  assert page.inner_text(".asked") == "One?"
  assert page.inner_text(".text") == "Hello there."
  assert page.input_value("#question") == "half a thought"
  page.click("#new-chat")
  assert page.locator(".turn").count() == 0
  assert page.is_visible("#empty")
  page.click("#notice >> text=Undo")
  assert page.inner_text(".asked") == "One?"
  page.click("#new-chat")
  page.reload()
  assert page.locator(".turn").count() == 0
  assert page.evaluate("localStorage.length") == 0


@pytest.mark.parametrize(
  ("status", "headers", "said"),
  [
    (429, {"Retry_After": "5"}, "Wait, and try again in 5 seconds."),
    (400, {}, "<b>the model reads 64 tokens</b>"),
    (413, {}, "more text than the server takes"),
    (500, {}, "The server could not do this (error 500)."),
    (503, {}, "The server is not ready."),
  ],
)
def test_an_error_says_what_to_do_and_the_question_can_be_asked_again(open_page, stand_in, status, headers, said):
  stand_in.refuse("POST", "/v1/chat/completions", status, "<b>the model reads 64 tokens</b>", **headers)
  page = open_page()
  ask(page, "Well?", state="failed")
  assert said in page.inner_text(f"{LAST} .state")
  assert said in page.text_content("#announcer")
  stand_in.reply("POST", "/v1/chat/completions", answer("Well."))
  page.click(f"{LAST} .retry")
  page.wait_for_selector(f"{LAST}[data-state=done]")
  assert page.inner_text(f"{LAST} .text") == "Well."
  assert page.locator(".turn").count() == 1


@pytest.mark.parametrize("is_told", [True, False])
def test_an_answer_that_breaks_off_keeps_what_came(open_page, stand_in, is_told):
  error = {"error": {"message": "the server stops", "type": "server_error", "param": None, "code": "shutdown"}}
  half = answer("Half a", is_whole=False) + (sse(error) if is_told else "")
  stand_in.reply("POST", "/v1/chat/completions", half)
  page = open_page()
  ask(page, "Well?", state="failed")
  assert page.inner_text(f"{LAST} .text") == "Half a"
  told, broken = "The server ended this answer. It says: the server stops", "The connection ended before"
  said = told if is_told else broken
  assert said in page.inner_text(f"{LAST} .state")


def test_a_server_that_was_away_is_found_again(open_page, stand_in):
  models = stand_in.replies["GET", "/v1/models"]
  stand_in.go_away("/v1/models")
  page = open_page(is_ready=False)
  page.wait_for_selector("#notice:has-text('The server cannot be reached.')")
  stand_in.replies["GET", "/v1/models"] = models
  page.wait_for_selector("#notice:has-text('The server is back.')")
  assert page.locator("#model option").all_text_contents() == ["tiny"]  # an encoder writes no answers
  stand_in.go_away("/v1/chat/completions")
  ask(page, "Are you there?", state="failed")
  assert "The server cannot be reached." in page.inner_text(f"{LAST} .state")


def test_a_knowledge_base_that_is_gone_is_told(open_page, stand_in):
  page = open_page()
  page.select_option("#where", "kb:letters")
  stand_in.reply("GET", "/v1/knowledge_bases", {"data": []})
  page.reload()
  page.wait_for_selector("#notice:has-text('letters is no longer there to search.')")
  assert page.input_value("#where") == ""


def test_a_server_without_a_memory_has_no_panel(open_page, stand_in):
  stand_in.refuse("GET", "/v1/memory", 404, "this server has no memory")
  page = open_page()
  assert page.is_hidden("#open-memory")
  ask(page, "One?")
  assert page.is_hidden(".remember")
  assert page.locator("#where option").all_text_contents() == ["Nothing", "letters (1,200)"]


def test_hostile_text_stays_text(open_page, stand_in):
  """Whatever the model, a document, the memory or the server's names hold, no element comes of it."""
  names = {"id": HOSTILE, "title": HOSTILE, "text": HOSTILE, "source": f"a\u202egpj.exe {HOSTILE}", "score": None}
  text = (
    f"{HOSTILE} [1] **{HOSTILE}** `{HOSTILE}`\n\n```{HOSTILE}\n{HOSTILE}\n```\n# {HOSTILE}\n[x](javascript:alert(3))"
  )
  stand_in.reply("GET", "/v1/models", {"data": [{"id": HOSTILE}, {"id": "other"}]})
  stand_in.reply("GET", "/v1/knowledge_bases", {"data": [{"id": HOSTILE, "documents": 1}]})
  stand_in.reply("POST", "/v1/chat/completions", answer(text, [source(1, is_cited=True, **names)]))
  stand_in.memory = {HOSTILE: (HOSTILE, HOSTILE)}
  page = open_page()
  images, scripts = page.locator("img").count(), page.locator("script").count()
  ask(page, HOSTILE, f"kb:{HOSTILE}")
  page.click(".citation")
  stand_in.refuse("POST", "/v1/chat/completions", 400, HOSTILE)
  ask(page, HOSTILE, state="failed")
  page.click("#open-memory")
  page.wait_for_selector("#memories li")
  page.click("#memories .edit")
  assert page.input_value("#memories textarea") == HOSTILE
  page.reload()
  page.wait_for_selector(".citation")
  assert page.locator("img").count() == images
  assert page.locator("script").count() == scripts
  links = page.locator("main a").evaluate_all("links => links.map((link) => link.getAttribute('href'))")
  assert links
  assert all(link.startswith("#source-") for link in links)
  assert HOSTILE in page.inner_text(".text p >> nth=0")
  assert page.locator(".place").first.text_content().startswith("a\\u202egpj.exe")  # not reordered into exe.jpg


def test_the_page_refuses_markup_from_strings(open_page):
  page = open_page()
  why = page.evaluate("(() => { try { document.body.innerHTML = '<b>x</b>' } catch (error) { return error.name } })()")
  assert why == "TypeError"


def test_a_key_is_asked_for_and_kept_in_the_tab_alone(open_page, stand_in):
  kept = dict(stand_in.replies)

  def lock():
    for method, path in [*kept, ("GET", "/v1/memory")]:
      stand_in.refuse(method, path, 401, "a key, please")

  lock()
  page = open_page(is_ready=False)
  page.wait_for_selector("#key:modal")
  assert page.inner_text("#key-reason") == "This server asks for a key."
  assert page.evaluate("document.activeElement.id") == "key-value"
  page.fill("#key-value", "wrong")
  page.press("#key-value", "Enter")
  page.wait_for_selector("#key-reason:has-text('The server does not accept this key.')")
  stand_in.replies = dict(kept)
  page.fill("#key-value", "right-key")
  page.press("#key-value", "Enter")
  page.wait_for_selector("#model:not([hidden])")
  lock()
  page.fill("#question", "Well?")
  page.press("#question", "Enter")
  page.wait_for_selector("#key:modal")
  stand_in.replies = dict(kept)
  page.fill("#key-value", "newer-key")
  page.press("#key-value", "Enter")
  page.wait_for_selector(f"{LAST}[data-state=done]")  # asked again by itself
  sent = [headers.get("authorization") for _, _, headers, _ in stand_in.requests]
  assert sent[0] is None
  assert sent[-1] == "Bearer newer-key"
  assert page.evaluate("[localStorage.length, document.cookie, location.search]") == [0, "", ""]
  assert "newer-key" not in page.content()
  assert "newer-key" not in json.dumps(page.evaluate("sessionStorage.getItem('selfrag_jax.conversation')"))
