"""The settings of the server: where it listens, and how much it takes at once."""

import dataclasses
import ipaddress

from selfrag_jax.checked import Checked, Count, Natural, Positive


@dataclasses.dataclass(frozen=True)
class ServerSettings(Checked):
  """Where the server listens, and its limits.

  max_body_bytes: a longer body is refused. body_seconds: the time that a body may take to arrive.
  max_waiting: texts that may wait for a slot of the engine; a request for more is refused, to be tried again.
  max_tokens: the most tokens that a request may ask for, in each of its texts. request_seconds: the most time for the
  texts of a request. shutdown_seconds: the time that running requests get to finish when the server is stopped.
  reload_seconds: how often knowledge bases are looked at for a newer version.
  """

  host: str = "127.0.0.1"
  port: Natural = 8000
  max_body_bytes: Count = 1 << 20
  body_seconds: Positive = 30.0
  max_waiting: Natural = 64
  max_tokens: Count = 4096
  request_seconds: Positive = 300.0
  shutdown_seconds: Positive = 30.0
  reload_seconds: Positive = 2.0

  @property
  def is_loopback(self) -> bool:
    """Whether only programs of this machine reach the server."""
    try:
      return ipaddress.ip_address(self.host).is_loopback
    except ValueError:
      return self.host == "localhost"
