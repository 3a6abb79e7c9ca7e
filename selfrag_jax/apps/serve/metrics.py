"""What the server counts, in the text format of Prometheus."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Metrics:
  """The counters of one server."""

  content_type = CONTENT_TYPE_LATEST

  def __init__(self, load: Callable[[], dict[str, int]]):
    """load: how many texts are `active`, and how many are `waiting`."""
    self._registry = CollectorRegistry()
    known = {"registry": self._registry, "namespace": "selfrag"}
    self.requests = Counter("requests", "Requests by route and status.", ["method", "route", "status"], **known)
    self.prompt_tokens = Counter("prompt_tokens", "Tokens of prompts.", **known)
    self.reused_tokens = Counter("reused_tokens", "Tokens of prompts that had been read before.", **known)
    self.tokens = Counter("completion_tokens", "Tokens that the model wrote.", **known)
    self.cancelled = Counter("cancelled", "Texts that were cancelled before their end.", **known)
    self.first_token = Histogram(
      "first_token_seconds", "Time from a request to its first token.", buckets=SECONDS, **known
    )
    self.request_seconds = Histogram("request_seconds", "Time of requests.", ["route"], buckets=SECONDS, **known)
    self.reloads = Counter("knowledge_base_reloads", "Newer versions that were loaded.", ["name", "outcome"], **known)
    for name in ("active", "waiting"):
      gauge = Gauge(f"texts_{name}", f"Texts that are {name} in the engine.", **known)
      gauge.set_function(lambda name=name: load()[name])

  def text(self) -> bytes:
    """Return all counters."""
    return generate_latest(self._registry)
