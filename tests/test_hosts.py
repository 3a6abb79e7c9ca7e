"""Processes find each other, wait for each other, and all end with a name when one is lost."""

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from jax._src.clusters import cloud_tpu_cluster

from selfrag_jax import hosts

ROOT = Path(__file__).resolve().parents[1]
HERE = socket.gethostname()
PROGRAM = """
import os, signal, sys, time
from selfrag_jax import hosts
hosts.LOST_SECONDS, hosts._BEAT_SECONDS, hosts._SETTLE_SECONDS = 4.0, 0.5, 1.0
place = hosts.find()
hosts.join(place, float(sys.argv[1]))
i = place.process_id
print("joined", flush=True)
exec(sys.argv[2])
"""


def free_port() -> int:
  """Return a port that is free, as is the one above it, and that no program is given that asks for any."""
  while True:
    port = random.randrange(20000, 32000)
    with socket.socket() as one, socket.socket() as other, contextlib.suppress(OSError):
      one.bind(("127.0.0.1", port))
      other.bind(("127.0.0.1", port + 1))
      return port


def start(
  code: str, numbers: Sequence[int], n: int, port: int, seconds: float = 60, program: str = PROGRAM
) -> list[subprocess.Popen[str]]:
  """Start these processes of `n`; each runs `code` once all have joined."""
  told = {"PYTHONPATH": str(ROOT), "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": str(n)}
  pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
  command = [sys.executable, "-c", program, str(seconds), code]
  return [subprocess.Popen(command, env=os.environ | told | {"JAX_PROCESS_ID": str(i)}, **pipes) for i in numbers]


def ended(processes: Sequence[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
  """Return code, output and errors of each process, the lines of JAX left out."""
  found = []
  for process in processes:
    out, err = process.communicate(timeout=120)
    told = [line for line in err.splitlines() if line.startswith(("error", "Traceback", "ValueError"))]
    found.append((process.returncode, out, "\n".join(told)))
  return found


def run(code: str, n: int = 2, program: str = PROGRAM) -> list[tuple[int, str, str]]:
  return ended(start(code, range(n), n, free_port(), program=program))


def test_a_barrier_waits_for_a_late_process():
  late = "time.sleep(6 * i); hosts.barrier('here'); hosts.barrier('again'); print('passed')"  # longer than LOST_SECONDS
  for code, out, err in run(late):
    assert (code, out.split(), err) == (0, ["joined", "passed"], "")


def test_a_barrier_names_who_does_not_come():
  for code, _, err in run("time.sleep(60 * (i > 0)); hosts.barrier('the middle', 3)", n=3):
    assert code == 1
    missing = f"error: process 1 on {HERE}, process 2 on {HERE} did not come to 'the middle' within 3 s"
    assert err.startswith(f"{missing}; there: process 0 on {HERE};")


@pytest.mark.parametrize("victim", [0, 1])
def test_the_end_of_a_killed_process_is_the_end_of_all(victim):
  began = time.monotonic()
  found = run(f"time.sleep(1); i == {victim} and os.kill(os.getpid(), signal.SIGKILL); time.sleep(90)")
  assert time.monotonic() - began < 60
  assert found[victim][0] == -signal.SIGKILL
  code, out, err = found[1 - victim]
  assert out == "joined\n"
  assert (code, err.count("\n")) == (1, 0)
  assert re.match(f"error: process {victim} on {HERE} .*was lost; run the same command again", err)


def test_the_error_of_one_process_is_told_by_all():
  (code, _, mine), (other_code, _, other) = run(
    "hosts.leave('error: disk\\x1b full') or os._exit(7) if i else time.sleep(60)"
  )
  assert (code, mine) == (1, f"error: process 1 on {HERE} ended: disk\\x1b full")
  assert (other_code, other) == (7, "")
  (code, _, _), (other_code, _, other) = run("time.sleep(60) if i else hosts.leave('no data') or os._exit(7)")
  assert (code, other_code, other) == (7, 1, f"error: process 0 on {HERE} ended: no data")


def test_a_process_that_stands_still_counts_as_lost_and_ends_when_it_goes_on():
  processes = start("time.sleep(1); i and os.kill(os.getpid(), signal.SIGSTOP); time.sleep(60)", (0, 1), 2, free_port())
  [(code, _, err)] = ended(processes[:1])
  assert (code, err.split(" and counts")[0]) == (1, f"error: process 1 on {HERE} has not answered for 4 s")
  processes[1].send_signal(signal.SIGCONT)
  assert ended(processes[1:])[0][0] not in (0, None)


@pytest.mark.parametrize(
  ("alone", "said"),
  [
    (0, f"process 1, process 2 did not join within 4 s; there: process 0 on {HERE}"),
    (2, "process 0 did not answer at 127"),
  ],
)
def test_a_process_that_never_joins_is_named(alone, said):
  [(code, out, err)] = ended(start("", [alone], 3, free_port(), seconds=4))
  assert (code, out) == (1, "")
  assert err.startswith(f"error: {said}")


def test_a_number_that_is_taken_and_another_size_are_refused():
  port = free_port()
  first = start("", [0], 2, port, seconds=20)
  with socket.create_server(("127.0.0.1", 0)):  # whoever else knocks is no process of the run
    while True:
      try:
        with socket.create_connection(("127.0.0.1", port + 1)) as stranger:
          stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
          assert stranger.recv(100) == b""
        break
      except ConnectionRefusedError:
        time.sleep(0.1)
  [(code, _, err)] = ended(start("", [2], 3, port))
  assert (code, err) == (1, f"error: process 2 of 3 on {HERE} cannot join: this run has 2 processes; start all alike")
  again = start("", [0], 2, port)  # its line cannot open
  [(code, _, err)] = ended(again)
  assert code == 1
  assert err.startswith(f"error: port {port + 1}, beside that of the coordinator, cannot be opened")
  second = start("time.sleep(5)", [1], 2, port)
  assert [code for code, *_ in ended([*first, *second])] == [0, 0]


def test_a_limit_ends_with_its_barrier():
  for code, out, err in run("hosts.barrier('x', 5); time.sleep(3 + 4 * i); hosts.barrier('x', 60); print('passed')"):
    assert (code, out.split(), err) == (0, ["joined", "passed"], "")  # 5 s after the first, one waits at the second


def test_nobody_waits_for_a_process_that_has_ended():
  (code, _, err), (other_code, _, other) = run("i and hosts.leave(); i or hosts.barrier('x', 50)")
  assert (code, err.split(";")[0]) == (1, f"error: process 1 on {HERE} ended before 'x', where others wait")
  assert (other_code, other) == (0, "") or other_code < 0  # JAX may end it first


def test_whoever_ends_waits_for_those_who_still_work():
  impatient = "initialize = jax.distributed.initialize\njax.distributed.initialize = lambda *args: "
  impatient += "initialize(*args, shutdown_timeout_seconds=2)\n"  # JAX itself waits for 300 seconds, and ends both then
  program = PROGRAM.replace("place = ", f"import jax\n{impatient}place = ", 1)
  assert [code for code, *_ in run("time.sleep(0 if i else 6)", program=program)] == [0, 0]


def test_an_error_that_nobody_catches_is_told_however_long():
  (code, _, err), (other_code, _, _) = run("if i: raise ValueError('x' * 50_000)\ntime.sleep(60)")
  assert (code, other_code) == (1, 1)
  assert err.startswith(f"error: process 1 on {HERE} ended: ValueError('xxx")
  assert len(err) < 3000


def test_a_process_whose_errors_nobody_reads_ends_too():
  processes = start("time.sleep(1); i and os.kill(os.getpid(), signal.SIGKILL); time.sleep(60)", (0, 1), 2, free_port())
  processes[0].stderr.close()
  assert processes[0].wait(timeout=50) == 1
  processes[1].communicate()


def test_ctrl_c_while_process_0_is_not_there_ends_at_once():
  code = "import os, signal, threading, jax; from selfrag_jax import hosts\n"
  code += (
    "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # whoever starts tests in the background ignores it
  )
  code += "threading.Timer(2, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
  code += f"try: hosts.join(hosts.Place('127.0.0.1:{free_port()}', 2, 1))\nexcept KeyboardInterrupt: hosts.leave('x')"
  found = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=50)
  assert found.returncode == 0


EXPLICIT = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
SLURM = {
  "SLURM_JOB_ID": "65537", "SLURM_STEP_NODELIST": "node[007-015],x", "SLURM_NTASKS": "4", "SLURM_PROCID": "3",
  "SLURM_LOCALID": "1", "SLURM_STEP_NUM_NODES": "2",
}  # fmt: skip
OPEN_MPI = {
  "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911", "OMPI_COMM_WORLD_SIZE": "4",
  "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}  # fmt: skip
GKE = {"TPU_WORKER_HOSTNAMES": "127.0.0.1,10.0.0.2,10.0.0.3,10.0.0.4", "TPU_WORKER_ID": "3"}


@pytest.mark.parametrize(
  ("environ", "place"),
  [
    ({}, None),
    (EXPLICIT, ("a:1", 4, 3, None)),
    (SLURM, ("node007:61441", 4, 3, (1,), 63489)),
    (SLURM | EXPLICIT, ("a:1", 4, 3, None)),
    (SLURM | {"JAX_NUM_PROCESSES": "1"}, None),
    (SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, None),
    (OPEN_MPI, ("10.96.0.1:62624", 4, 3, (1,), 64672)),
    (GKE, ("127.0.0.1:8482", 4, 3, None, 10530)),
  ],
)
def test_a_process_finds_its_place(monkeypatch, environ, place):
  for name in (*EXPLICIT, *SLURM, *OPEN_MPI, *GKE):
    monkeypatch.delenv(name, raising=False)
  for name, value in environ.items():
    monkeypatch.setenv(name, value)
  if environ == GKE:
    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    monkeypatch.setattr("jax._src.clusters.cluster.running_in_cloud_tpu_vm", True)
    monkeypatch.setattr(cloud_tpu_cluster, "get_metadata", lambda key: ("", 404))
  assert hosts.find(environ=os.environ) == (place and hosts.Place(*place))


def test_the_line_has_the_port_beside_that_of_the_coordinator():
  assert hosts.Place("[::1]:65535", 2, 0).line == ("::1", 65534)
  assert hosts.Place("a:1", 2, 0).line == ("a", 2)
  assert hosts.Place("localhost:1", 2, 0).line == ("127.0.0.1", 2)
  assert hosts.Place("a:1", 2, 0, None, 9).line == ("a", 9)


def test_flags_come_before_the_environment():
  assert hosts.find("b:2", 2, 0, environ=EXPLICIT) == hosts.Place("b:2", 2, 0)
  assert hosts.find(num_processes=1, environ=EXPLICIT) is None


@pytest.mark.parametrize(
  ("told", "said"),
  [
    (("a:1", 2, None), "--process_id too (or JAX_PROCESS_ID)"),
    ((None, 2, None), "--coordinator --process_id too (or JAX_COORDINATOR_ADDRESS, JAX_PROCESS_ID)"),
    (("a", 2, 0), "HOST:PORT"),
    (("a:x", 2, 0), "HOST:PORT"),
    (("http://a:1", 2, 0), "HOST:PORT"),
    (("a:65536", 2, 0), "HOST:PORT"),
    (("a:1", 2, 2), "process_id is 2 of 2"),
    (("a:1", 0, 0), "process_id is 0 of 0"),
  ],
)
def test_a_place_that_cannot_be_is_refused(told, said):
  with pytest.raises(ValueError, match=re.escape(said)):
    hosts.find(*told, environ={})


def test_a_number_in_the_environment_must_be_one():
  with pytest.raises(ValueError, match="JAX_PROCESS_ID is 'x'"):
    hosts.find(environ=EXPLICIT | {"JAX_PROCESS_ID": "x"})
