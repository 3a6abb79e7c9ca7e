"""`HttpRetriever`, the documents of a knowledge base that a server of `launch/serve.py` searches."""

import http.client
import json
import os
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

from selfrag_jax.retrieval.document import Document

LONGEST = 1 << 26  # bytes of an answer: a broken server must not fill the memory


class HttpRetriever:
  """Finds documents of a server's knowledge base, or of its memory; threads may share one.

  `answer`, the tool `Search` and rollouts on the host take it in place of a retriever: it has `retrieve` and
  `retrieve_batch`, and adds and deletes nothing.
  """

  def __init__(
    self, url: str, knowledge_base: str | None = None, *, api_key_env: str = "SELFRAG_API_KEY", timeout: float = 30.0
  ):
    """url: such as http://127.0.0.1:8000. knowledge_base: its name there (None: the memory). api_key_env: the
    environment variable with the key, if the server asks for one. timeout: seconds of a search.

    Raises ValueError for an address that is none.
    """
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
      raise ValueError(f"{url!r} is no address of a server, such as http://127.0.0.1:8000")
    self._parts, self._api_key_env, self._timeout = parts, api_key_env, timeout
    self._place = {"memory": True} if knowledge_base is None else {"knowledge_base": knowledge_base}

  def retrieve(self, query: str, top_k: int = 5, *, where: Mapping[str, Any] | None = None) -> list[Document]:
    """Return the best documents for a query, best first, each with its score; none for an empty query.

    Raises ValueError for what the server refuses, and OSError if it cannot be asked or fails.
    """
    if not query.strip():
      return []
    body = {"query": query, "top_k": top_k, "where": where, **self._place}
    status, text = self._post("/v1/search", json.dumps(body).encode())
    try:
      reply = json.loads(text)
      if status == 200:
        return [_document(each) for each in reply["data"]]
      message = str(reply["error"]["message"])
    except (LookupError, TypeError, ValueError, RecursionError):
      status, message = (502 if status == 200 else status), "it sent no result of a search"
    error = ValueError if 400 <= status < 500 and status not in (408, 429) else ConnectionError
    raise error(f"{self._parts.netloc} answered {status}: {message:.300}")

  def retrieve_batch(
    self, queries: Sequence[str], top_k: int = 5, *, where: Mapping[str, Any] | None = None
  ) -> list[list[Document]]:
    """Return the best documents for each query; see `retrieve`."""
    return [self.retrieve(query, top_k, where=where) for query in queries]

  def _post(self, path: str, body: bytes) -> tuple[int, bytes]:
    kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get(self._api_key_env):
      headers["Authorization"] = f"Bearer {key}"
    connection = kind(self._parts.hostname or "", self._parts.port, timeout=self._timeout)
    try:
      # no redirect is followed: the key is for this server
      connection.request("POST", self._parts.path.rstrip("/") + path, body, headers)
      response = connection.getresponse()
      return response.status, response.read(LONGEST)
    except http.client.HTTPException as error:
      raise ConnectionError(f"{self._parts.netloc} does not speak HTTP: {error!r}") from None
    finally:
      connection.close()


def _document(found: Mapping[str, Any]) -> Document:
  texts = {"id": found["id"], "title": found["title"], "content": found["text"], "source": found["source"]}
  return Document(**texts, metadata=found["metadata"], score=found["score"])
