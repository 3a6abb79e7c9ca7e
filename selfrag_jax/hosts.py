"""The processes of a run on several hosts: how they find each other, wait for each other, and end when one is lost.

Without this, a process that waits for a missing one ends after minutes, with a stack trace that names nobody. So each
process holds a line to process 0, one port beside JAX's own. On it they call the roll before JAX starts, wait at
barriers, tell why they end, and notice within seconds who is gone.
"""

import asyncio
import atexit
import contextlib
import dataclasses
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from selfrag_jax.text.printable import printable

JOIN_SECONDS = 300.0  # until every process must have joined; pods start their hosts minutes apart
BARRIER_SECONDS = 600.0
END_SECONDS = 3600.0
LOST_SECONDS = 45.0  # of silence, after which a process counts as lost; the end of its line is noticed at once
VARIABLES = {
  "coordinator": "JAX_COORDINATOR_ADDRESS",
  "num_processes": "JAX_NUM_PROCESSES",
  "process_id": "JAX_PROCESS_ID",
}
_BEAT_SECONDS = 5.0
_SETTLE_SECONDS = 3.0
_LONGEST_REASON = 2000  # characters
_LONGEST_MESSAGE = 2**24  # bytes: the names of all hosts are one message
_ENDED = "run the same command again on all hosts to go on from the newest checkpoint"


@dataclasses.dataclass(frozen=True)
class Place:
  """The place of this process in a run: the address of process 0 as HOST:PORT, how many there are, and its number."""

  coordinator: str
  num_processes: int
  process_id: int
  local_device_ids: tuple[int, ...] | None = None  # of the devices that JAX may see; all by default
  line_port: int = 0  # of the line to process 0; 0: the port beside that of the coordinator

  def __post_init__(self):
    host, _, port = self.coordinator.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 65536:
      raise ValueError(
        f"the coordinator is {self.coordinator!r}; it must be HOST:PORT of process 0, such as 10.0.0.1:1234"
      )
    if not 0 <= self.process_id < self.num_processes:
      raise ValueError(f"process_id is {self.process_id} of {self.num_processes}: they are numbered from 0 on")

  @property
  def line(self) -> tuple[str, int]:
    """The address of the line to process 0."""
    host, _, port = self.coordinator.rpartition(":")
    beside = int(port) + (1 if int(port) < 65535 else -1)
    # a server on `localhost` opens on ::1 too, which not every host has
    return "127.0.0.1" if host == "localhost" else host.strip("[]"), self.line_port or beside


def find(
  coordinator: str | None = None,
  num_processes: int | None = None,
  process_id: int | None = None,
  environ: Mapping[str, str] = os.environ,
) -> Place | None:
  """Return the place of this process; None if it is alone. Call it before any JAX operation.

  What is not given comes from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID; if none of these is told,
  from Slurm, Open MPI, Cloud TPU or GKE, as JAX finds them. `num_processes=1` is alone, whatever they say. Raises
  ValueError for a place that is told in part.
  """
  told: dict[str, Any] = {"coordinator": coordinator, "num_processes": num_processes, "process_id": process_id}
  for name, variable in VARIABLES.items():
    if told[name] is None and (value := environ.get(variable)):
      if name != "coordinator" and not value.isdecimal():
        raise ValueError(f"{variable} is {value!r}, it must be a whole number")
      told[name] = value if name == "coordinator" else int(value)
  if told["num_processes"] == 1:
    return None
  missing = [name for name, value in told.items() if value is None]
  if len(missing) == len(told):
    return _of_cluster()
  if missing:
    variables = ", ".join(VARIABLES[name] for name in missing)
    raise ValueError(f"a run of several processes needs --{' --'.join(missing)} too (or {variables})")
  return Place(**told)


def _of_cluster() -> Place | None:
  """Return the place that a cluster gives this process; None if there is no cluster, or one process alone."""
  from jax._src import clusters  # JAX shows its detection in no other way than by starting

  found = clusters.ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, int(JOIN_SECONDS))
  coordinator, num_processes, process_id, devices = found
  if coordinator is None or num_processes is None or process_id is None or num_processes == 1:
    return None
  # Slurm and Open MPI number the ports of coordinators by job: the port beside one is that of the next job
  line_port = int(coordinator.rpartition(":")[2]) ^ 2048
  return Place(coordinator, num_processes, process_id, tuple(devices) if devices is not None else None, line_port)


def join(place: Place | None, seconds: float = JOIN_SECONDS) -> None:
  """Meet the other processes and start JAX on all of them; do nothing for None. Call it before any JAX operation.

  Ends this process with an error that names who has not come within `seconds`, and later, who was lost.
  """
  global _line
  if place is None:
    return
  import jax  # not above: a launcher asks about processes also when it ends before JAX was needed

  _line = _Line(place)
  _line.start(seconds)
  if place.process_id == 0:
    more = f" and {place.num_processes - 8} more" if place.num_processes > 8 else ""
    print(f"{place.num_processes} processes: {', '.join(_line.names[:8])}{more}", file=sys.stderr, flush=True)
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  ids = place.local_device_ids and list(place.local_device_ids)
  jax.distributed.initialize(place.coordinator, place.num_processes, place.process_id, ids)
  atexit.register(_leave_at_exit)  # before JAX's own, at which the processes wait for each other, but not for long


def barrier(name: str, seconds: float = BARRIER_SECONDS) -> None:
  """Wait until every process is here; ends the run with the names of those that are not within `seconds`."""
  if _line is not None:
    _line.wait(name, seconds)


def leave(reason: str | None = None) -> None:
  """Tell the others that this process ends; with a reason, they end too, and say it."""
  global _line
  if _line is not None:
    _line.leave(reason)
    _line = None


def _leave_at_exit() -> None:
  """Wait for the others, who may still write a report; after an error that nobody has caught, tell it instead."""
  if (error := getattr(sys, "last_value", None)) is not None:
    leave(repr(error))
    os._exit(1)  # JAX would wait for the others before it lets this one end
  barrier("the end", END_SECONDS)
  leave()


def settle() -> None:
  """Wait before an error is told: it may come from a process that was lost, and that news ends this process."""
  if _line is not None:
    time.sleep(_SETTLE_SECONDS)


def joined() -> bool:
  """Tell whether this process is one of several."""
  return _line is not None


class _Line:
  """The line of a process to process 0, in a thread; process 0 holds the other ends, too."""

  def __init__(self, place: Place):
    self._place = place
    self._loop = asyncio.new_event_loop()
    self._writer: asyncio.StreamWriter | None = None
    self._passed: dict[str, threading.Event] = {}
    self.names: list[str] = []  # of the hosts, by the number of the process
    self._leaving = False
    self._closed = threading.Event()

  def start(self, seconds: float) -> None:
    """Call the roll."""
    passed = self._passed["roll"] = threading.Event()
    threading.Thread(target=self._run, args=(seconds,), daemon=True, name="hosts").start()
    passed.wait()

  def wait(self, name: str, seconds: float) -> None:
    passed = self._passed[name] = threading.Event()
    asyncio.run_coroutine_threadsafe(self._send(at=name, seconds=seconds), self._loop).result()
    passed.wait()
    del self._passed[name]

  def leave(self, reason: str | None) -> None:
    self._leaving = True
    if self._writer is None:  # it has not joined
      return
    reason = reason and reason[:_LONGEST_REASON]
    with contextlib.suppress(OSError, TimeoutError):  # whoever should hear it may be gone
      asyncio.run_coroutine_threadsafe(self._send(end=reason), self._loop).result(_BEAT_SECONDS)
    if reason is not None and self._place.process_id == 0:
      self._closed.wait(2 * _BEAT_SECONDS)  # until the others know: JAX ends them less kindly once this process is gone

  def _run(self, seconds: float) -> None:
    asyncio.set_event_loop(self._loop)
    try:
      self._loop.run_until_complete(self._talk(seconds))
    except Exception as error:  # without this thread, the process would wait for ever
      if not self._leaving:
        _end(f"the line to process 0 at {self._place.coordinator} broke: {error!r}; {_ENDED}")

  async def _talk(self, seconds: float) -> None:
    host, port = self._place.line
    if self._place.process_id == 0:
      desk = _Desk(self._place.num_processes, seconds, self._closed)
      try:
        await asyncio.start_server(desk.serve, host if _is_loopback(host) else None, port, limit=_LONGEST_MESSAGE)
      except OSError as error:
        _end(
          f"port {port}, beside that of the coordinator, cannot be opened: {error}; give the coordinator another port"
        )
    reader, self._writer = await self._connect(host, port, time.monotonic() + seconds)
    await self._send(process=self._place.process_id, of=self._place.num_processes, host=socket.gethostname())
    beats = asyncio.ensure_future(self._beat())
    said = "was lost"
    try:
      while (message := await asyncio.wait_for(_read(reader), LOST_SECONDS)) is not None:
        if message.get("end"):
          _end(message["end"])
        self.names = message.get("names", self.names)
        if (name := message.get("go")) in self._passed:
          self._passed[name].set()
    except TimeoutError:
      said = f"has not answered for {LOST_SECONDS:.0f} s and counts as lost"
    beats.cancel()
    if not self._leaving:
      on = f" on {self.names[0]}" if self.names else ""
      _end(f"process 0{on} at {self._place.coordinator} {said}; {_ENDED}")

  async def _connect(self, host: str, port: int, until: float) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    while True:
      try:
        return await asyncio.wait_for(asyncio.open_connection(host, port, limit=_LONGEST_MESSAGE), _BEAT_SECONDS)
      except (OSError, TimeoutError) as error:
        if time.monotonic() > until:
          at = f"{host}:{port}, beside the coordinator {self._place.coordinator}"
          _end(f"process 0 did not answer at {at}: {error or 'no answer'}; start it, or give its address")
        await asyncio.sleep(0.2)

  async def _beat(self) -> None:
    while True:
      await asyncio.sleep(_BEAT_SECONDS)
      await self._send()

  async def _send(self, **message: Any) -> None:
    assert self._writer is not None
    _write(self._writer, message)
    await self._writer.drain()


class _Desk:
  """The ends of the lines at process 0: who is there, who waits where, and what all must hear."""

  def __init__(self, n: int, seconds: float, closed: threading.Event):
    self._n, self._closed = n, closed
    self._lines: dict[int, asyncio.StreamWriter] = {}
    self._names: dict[int, str] = {}
    self._left: set[int] = set()
    self._waiting: dict[str, set[int]] = {}
    self._limits: dict[str, asyncio.TimerHandle] = {}
    self._limit("roll", seconds)

  async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Hold the line of one process."""
    hello = await _read(reader) or {}
    i, n, host = hello.get("process"), hello.get("of"), hello.get("host")
    if type(i) is not int or not isinstance(host, str):  # none of ours
      return writer.close()
    if n != self._n or not 0 <= i < self._n or i in self._names:
      other = (
        f"process {i} runs on {self._names[i]} already" if i in self._names else f"this run has {self._n} processes"
      )
      _write(writer, {"end": f"process {i} of {n} on {host} cannot join: {other}; start all alike"})
      return writer.close()
    self._names[i], self._lines[i] = host, writer
    self._arrive("roll", i)
    said: str | None = f"process {i} on {host} was lost, or is none of this run; {_ENDED}"
    try:
      said = await self._listen(reader, i)
    finally:
      del self._lines[i]
      if said is not None:
        self._tell(end=said)
    if not self._lines or list(self._lines) == [0]:
      self._closed.set()

  async def _listen(self, reader: asyncio.StreamReader, i: int) -> str | None:
    """Follow one process to its end, and return what the others must hear of it."""
    name = f"process {i} on {self._names[i]}"
    try:
      while (message := await asyncio.wait_for(_read(reader), LOST_SECONDS)) is not None:
        if "at" in message:
          self._arrive(message["at"], i, message["seconds"])
        elif "end" in message:
          self._left.add(i)
          said = message["end"] and f"{name} ended: {message['end'].removeprefix('error: ')}"
          return said or self._missed()
        else:
          _write(self._lines[i], {})
    except TimeoutError:
      return f"{name} has not answered for {LOST_SECONDS:.0f} s and counts as lost; {_ENDED}"
    return f"{name} was lost; {_ENDED}"

  def _arrive(self, barrier: str, i: int, seconds: float | None = None) -> None:
    here = self._waiting.setdefault(barrier, set())
    if not here and seconds is not None:
      self._limit(barrier, seconds)
    here.add(i)
    if len(here) == self._n:
      del self._waiting[barrier]
      self._limits.pop(barrier).cancel()
      names = {"names": [self._names[i] for i in range(self._n)]} if barrier == "roll" else {}
      self._tell(go=barrier, **names)
    elif said := self._missed():
      self._tell(end=said)

  def _limit(self, barrier: str, seconds: float) -> None:
    """End the run if not all have come within `seconds`."""
    self._limits[barrier] = asyncio.get_running_loop().call_later(seconds, self._overdue, barrier, seconds)

  def _overdue(self, barrier: str, seconds: float) -> None:
    here = self._waiting.get(barrier, set())
    missing = ", ".join(self._name(i) for i in range(self._n) if i not in here)
    there = ", ".join(self._name(i) for i in sorted(here))
    where, then = f"come to {barrier!r}", _ENDED
    if barrier == "roll":
      where, then = "join", "start the same command there, too"
    self._tell(end=f"{missing} did not {where} within {seconds:.0f} s; there: {there}; {then}")

  def _missed(self) -> str | None:
    """Return what to tell those who wait for a process that has ended without an error; None if nobody does."""
    for barrier, here in self._waiting.items():
      if here and self._left:
        gone = ", ".join(self._name(i) for i in sorted(self._left))
        return f"{gone} ended before {barrier!r}, where others wait; {_ENDED}"
    return None

  def _name(self, i: int) -> str:
    return f"process {i}" + (f" on {self._names[i]}" if i in self._names else "")

  def _tell(self, **message: Any) -> None:
    for writer in self._lines.values():
      _write(writer, message)


async def _read(reader: asyncio.StreamReader) -> dict[str, Any] | None:
  """Read a message; None at the end of the line, and for what is no message."""
  try:
    message = json.loads(await reader.readline())
  except (OSError, ValueError):
    return None
  return message if isinstance(message, dict) else None


def _write(writer: asyncio.StreamWriter, message: Mapping[str, Any]) -> None:
  if not writer.is_closing():
    writer.write(json.dumps(message).encode() + b"\n")


def _is_loopback(host: str) -> bool:
  return host.startswith("127.") or host == "::1"


def _end(reason: str) -> None:
  """End this process at once: its other threads may wait for a process that is gone."""
  try:
    os.write(2, f"error: {printable(reason)}\n".encode())
  finally:  # whoever read the errors may have gone
    os._exit(1)


_line: _Line | None = None
