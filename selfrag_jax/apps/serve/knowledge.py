"""The knowledge bases of the server: each searched in a thread of its own, and loaded anew when it was rebuilt."""

import asyncio
import logging
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from selfrag_jax.apps.serve.errors import APIError, invalid
from selfrag_jax.apps.serve.metrics import Metrics
from selfrag_jax.memory.filters import Where
from selfrag_jax.retrieval.base import load
from selfrag_jax.retrieval.document import Document
from selfrag_jax.storage.generation import version
from selfrag_jax.text.printable import printable

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class KnowledgeBase:
  """A knowledge base in a folder, which another process may rebuild: until that has ended, the old one is searched."""

  def __init__(self, name: str, folder: str):
    """Load it. Raises as `retrieval.load`."""
    self.name, self._folder = name, folder
    self._seen = version(folder)  # before the load: what is published meanwhile is loaded later
    self._retriever = load(folder)
    self._failure = ""  # the last one that was told
    self._worker = ThreadPoolExecutor(1, thread_name_prefix=f"kb-{name}")  # threads may not share a retriever

  def __len__(self) -> int:
    return len(self._retriever)

  def retrieve(self, query: str, top_k: int = 5, *, where: Where | None = None) -> list[Document]:
    """Return the best documents for a query, from any thread; see `BaseRetriever.retrieve`."""
    return self._worker.submit(self._retrieve, query, top_k, where).result()

  async def search(self, query: str, top_k: int, where: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """Return the best documents for a query, best first. Raises APIError for a filter that is refused."""
    call = asyncio.get_running_loop().run_in_executor(self._worker, self._retrieve, query, top_k, where)
    try:
      return [*map(as_result, await call)]
    except ValueError as error:
      raise invalid(error) from None

  def _retrieve(self, query: str, top_k: int, where: Where | None) -> list[Document]:
    return self._retriever.retrieve(query, top_k, where=where)

  def refresh(self) -> str | None:
    """Load a newer version, if there is one. Returns "loaded", "failed", or None if there is none.

    A version that cannot be loaded is told in the log, once; the old one stays.
    """
    is_new = False
    try:
      if is_new := (newest := version(self._folder)) not in (self._seen, ""):
        self._seen = newest
        self._retriever = load(self._folder)
    except Exception as error:  # whatever is wrong with the new one, the old one can be searched
      if (failure := printable(str(error))) == self._failure and not is_new:  # a folder that stays unreadable
        return None
      self._failure = failure
      logging.error("knowledge base %s: the new version was not loaded: %s", self.name, failure)
      return "failed"
    self._failure = ""
    return "loaded" if is_new else None

  def close(self) -> None:
    """End the thread."""
    self._worker.shutdown(cancel_futures=True)


def as_result(document: Document) -> dict[str, Any]:
  """Return a document as it is written to clients."""
  fields = document.fields
  return {
    "id": document.id,
    "title": str(fields["title"]),
    "text": document.content,
    "source": str(fields["source"]),
    "score": document.score,
    "metadata": document.to_dict()["metadata"],
  }


def open_knowledge_bases(named: Sequence[str]) -> dict[str, KnowledgeBase]:
  """Load knowledge bases that are given as NAME=FOLDER. Raises ValueError for another form and a name given twice."""
  folders: dict[str, str] = {}
  for each in named:
    name, sign, folder = each.partition("=")
    if not sign or not folder or not NAME.fullmatch(name):
      raise ValueError(f"--knowledge_base={each}: write NAME=FOLDER; a name has letters, digits, '.', '_' and '-'")
    if name in folders:
      raise ValueError(f"--knowledge_base={each}: the name {name} is given twice")
    folders[name] = folder
  return {name: KnowledgeBase(name, folder) for name, folder in folders.items()}


async def keep_fresh(bases: Mapping[str, KnowledgeBase], seconds: float, metrics: Metrics) -> None:
  """Look for newer versions of knowledge bases, for as long as the server runs."""
  while bases:
    await asyncio.sleep(seconds)
    for base in bases.values():
      if outcome := await asyncio.to_thread(base.refresh):
        metrics.reloads.labels(base.name, outcome).inc()


def find(bases: Mapping[str, KnowledgeBase], name: str) -> KnowledgeBase:
  """Return a knowledge base by its name. Raises APIError if there is none."""
  if name not in bases:
    known = f"there are {', '.join(bases)}" if bases else "the server was started without any"
    message = f"there is no knowledge base {name[:100]!r}; {known}"
    raise APIError(404, message, param="knowledge_base", code="knowledge_base_not_found")
  return bases[name]
