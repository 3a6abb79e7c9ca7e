"""A stand-in for the server behind the web page: a test chooses what it answers, and reads what it was asked."""

import json
from pathlib import Path
from typing import Any

import selfrag_jax.apps

FOLDER = Path(selfrag_jax.apps.__file__).parent / "serve" / "page"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
ORIGIN = "http://localhost:9"  # nothing listens there: the stand-in answers instead of the network
SETTLED = ".turn:last-child:not([data-state=writing])"


def sse(*chunks: Any, is_whole: bool = True) -> str:
  """Return the body of a stream of chunks; one that is not whole breaks off."""
  return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + ("data: [DONE]\n\n" if is_whole else "")


def answer(text: str, sources: Any = None, finish: str = "stop", is_whole: bool = True) -> str:
  """Return the body of a streamed answer, a word at a time."""
  words = [{"choices": [{"index": 0, "delta": {"content": word}}]} for word in text.split(" ")]
  for chunk in words[:-1]:
    chunk["choices"][0]["delta"]["content"] += " "
  last = {"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]}
  if sources is not None:
    last["sources"] = sources
  return sse(*words, *([last] if is_whole else []), is_whole=is_whole)


def source(number: int, **changes: Any) -> dict[str, Any]:
  """Return a source of an answer."""
  names = {
    "id": f"d{number}",
    "title": f"Title {number}",
    "text": f"Passage {number}.",
    "source": f"notes.txt:{number}",
  }
  return {"number": number, **names, "score": 1 - number / 10, "is_cited": False, **changes}


class StandIn:
  """Answers the page in the server's place. `replies` maps a method and path to (status, body, headers)."""

  def __init__(self):
    self.requests: list[tuple[str, str, dict[str, str], Any]] = []  # method, path, headers, body
    self.replies: dict[tuple[str, str], tuple[int, Any, dict[str, str]] | None] = {}
    self.memory = {"m1": ("Water the lemon tree on Sundays.", "notes.txt:1"), "m2": ("Pears keep in a cellar.", "")}
    self.reply("GET", "/v1/models", {"data": [{"id": "tiny", "kind": "chat"}, {"id": "words", "kind": "embeddings"}]})
    self.reply("GET", "/v1/knowledge_bases", {"data": [{"id": "letters", "documents": 1200}]})
    self.reply("POST", "/v1/chat/completions", answer("Hello there."))

  def reply(self, method: str, path: str, body: Any, status: int = 200, **headers: str) -> None:
    """Answer such requests from now on."""
    self.replies[method, path] = (status, body, {name.replace("_", "-"): value for name, value in headers.items()})

  def refuse(self, method: str, path: str, status: int, message: str = "", **headers: str) -> None:
    """Answer such requests with an error, as the server words it."""
    self.reply(
      method, path, {"error": {"message": message, "type": "", "param": None, "code": None}}, status, **headers
    )

  def go_away(self, path: str) -> None:
    """Refuse the connections for a path."""
    for method in ("GET", "POST", "PUT", "DELETE"):
      self.replies[method, path] = None

  def bodies(self, path: str) -> list[Any]:
    """Return the bodies of the requests for a path."""
    return [body for _, asked, _, body in self.requests if asked == path]

  def handle(self, route: Any) -> None:
    """Answer a request of the page, or its file."""
    request = route.request
    path = request.url.removeprefix(ORIGIN).partition("?")[0]
    file = FOLDER / ("index.html" if path == "/" else path[1:])
    if not path.startswith("/v1/"):
      route.fulfill(path=file, content_type=TYPES[file.suffix])
      return
    self.requests.append((request.method, path, request.headers, request.post_data_json))
    reply = self.replies.get((request.method, path), self._remembered(request.method, path))
    if reply is None:
      route.abort("connectionrefused")
      return
    status, body, headers = reply
    kind = "text/event-stream" if isinstance(body, str) else "application/json"
    text = body if isinstance(body, str) else json.dumps(body)
    route.fulfill(status=status, body=text, headers={"Content-Type": kind, **headers})

  def _remembered(self, method: str, path: str) -> tuple[int, Any, dict[str, str]]:
    items = [{"id": id, "text": text, "source": place} for id, (text, place) in self.memory.items()]
    if (method, path) == ("GET", "/v1/memory"):
      return 200, {"data": items, "total": len(items)}, {}
    return 404, {"error": {"message": f"there is no {path}"}}, {}


def ask(page: Any, question: str, where: str = "", state: str = "") -> None:
  """Ask a question by keyboard, and wait for the end of the answer."""
  page.select_option("#where", where)
  page.fill("#question", question)
  page.press("#question", "Enter")
  page.wait_for_selector(f"{SETTLED}[data-state={state}]" if state else SETTLED)
