"""The sandbox: the calls that it refuses a program, and the number of threads that it allows."""

import platform
import socket
import sys
import time

import pytest

from selfrag_jax.tasks import programs
from selfrag_jax.tasks.programs import TOO_LARGE, isolation, run_test

KEYCTL = {"x86_64": 250, "aarch64": 219}
COUNTED_NOWHERE = """
import ctypes, mmap, socket
c = ctypes.CDLL(None, use_errno=True)
c.shmat.restype = ctypes.c_void_p
def shared():
  for i in range(8):
    place = c.shmat(c.shmget(0, 64 << 20, 0o1600), None, 0)
    if place in (None, (1 << 64) - 1):
      return i
    ctypes.memset(place, 1, 64 << 20)
    c.shmdt(ctypes.c_void_p(place))
  return i
def in_sockets():
  a, b = socket.socketpair()
  a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)
"""


@pytest.mark.skipif(platform.machine() not in KEYCTL or sys.platform != "linux", reason="seccomp")
@pytest.mark.parametrize("refused", [(), ("unshare",), ("unshare", "Landlock")])
def test_memory_that_no_limit_counts_keys_and_sockets_are_refused(tmp_path, without, refused):
  without(tmp_path, refused)
  assert run_test(COUNTED_NOWHERE, "shared()", megabytes=256) == "0"
  assert run_test(COUNTED_NOWHERE, "in_sockets()").startswith("raised PermissionError")
  assert (
    run_test(COUNTED_NOWHERE, f"(c.syscall({KEYCTL[platform.machine()]}, 0, -3, 0), ctypes.get_errno())") == "(-1, 1)"
  )
  with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
    listener.bind(str(tmp_path / "socket"))
    listener.settimeout(0.1)
    for family in ("AF_UNIX", "AF_INET", "AF_INET6", "AF_NETLINK"):
      assert run_test("import socket", f"socket.socket(socket.{family})").startswith("raised PermissionError")
    say = f"socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', {str(tmp_path / 'socket')!r})"
    assert run_test("import socket", say).startswith("raised PermissionError")
    with pytest.raises(TimeoutError):
      listener.recv(1)
  assert "the network" in isolation().partition("CAN reach")[0]


def test_programs_may_be_asynchronous_and_start_others():
  program = "import asyncio, subprocess\nasync def f(): return 3\necho = ['/bin/echo', 'hi']"
  assert run_test(program, "asyncio.run(f())") == "3"
  assert run_test(program, "subprocess.run(echo, capture_output=True).stdout") in (
    r"b'hi\n'",
    "raised FileNotFoundError",
  )


THREADED = """
import threading, time
threading.stack_size(32768)
for i in range(5000):
  threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_threads_are_counted(monkeypatch):
  monkeypatch.setattr(programs, "THREADS", 20)  # below the limit that holds for who is not root
  began = time.monotonic()
  assert run_test(THREADED, "1", seconds=10).startswith((TOO_LARGE, "raised RuntimeError"))
  assert time.monotonic() - began < 15
