"""The process that runs a program, isolated as far as the operating system allows; a script, never imported.

It reads `[program, call]` as JSON from its input and writes the result of the call or, without arguments, what is
isolated. Steps that the system refuses are skipped; `selfrag_jax.tasks.programs.isolation` describes the outcome.
"""

import contextlib
import ctypes
import json
import os
import resource
import signal
import struct
import sys
import traceback

LONGEST = 10_000  # characters of an answer
PROCESSES = 32  # that a program may have at once
FILES = 64  # that a program may have open
NEW_USER, NEW_MOUNT, NEW_PID, NEW_NET, NEW_IPC = 0x10000000, 0x00020000, 0x20000000, 0x40000000, 0x08000000
BIND, RECURSIVE, PRIVATE, DETACH = 0x1000, 0x4000, 0x40000, 2  # of mount and umount2
AT_RECURSIVE, READ_ONLY, NO_SETUID = 0x8000, 1, 2  # of mount_setattr
DEATH_SIGNAL, SUBREAPER, NO_NEW_PRIVILEGES = 1, 36, 38  # of prctl
# numbers of system calls that the C library has no function for; those of newer calls are the same on all machines
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
MOUNT_SETATTR, CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 442, 444, 445, 446
READ, WRITE, ALL = 0b1101, 0b10, (1 << 13) - 1  # rights of Landlock: execute, read file, read folder; write file
SINCE = {2: 1 << 13, 3: 1 << 14, 5: 1 << 15}  # version of Landlock -> right that it added: refer, truncate, ioctl
# system calls for memory that no limit counts (of System V, of sockets), keys of the session, and the network
REFUSED = {  # shmget, shmat, semget, msgget, socket, connect, setsockopt, add_key, request_key, keyctl, io_uring
  "x86_64": (29, 30, 64, 68, 41, 42, 54, 248, 249, 250, 425),
  "aarch64": (194, 196, 190, 186, 198, 203, 208, 217, 218, 219, 425),
}
SOCKETPAIR, ARCHITECTURE = {"x86_64": 53, "aarch64": 199}, {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
SECCOMP, FILTER, ALLOW, REFUSE = 22, 2, 0x7FFF0000, 0x00050001  # of prctl, and of a filter: EPERM
LOAD, EQUAL, AT_LEAST, AND, RETURN = 0x20, 0x15, 0x35, 0x54, 0x06  # instructions of a filter
OTHER_ABI, STREAM = 0x40000000, 1
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/nix/store", "/gnu/store", "/etc/ld.so.cache", "/etc/localtime")

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int) -> int:
  """Return a result of the C library, or raise the OSError that it means."""
  if result < 0:
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
  return result


def prctl(*arguments: int | bytes) -> int:
  """Set an attribute of this process by prctl; -1 where the system has no such call."""
  return libc.prctl(*arguments) if sys.platform == "linux" else -1


def readable() -> list[str]:
  """Return the paths that a program may read: the interpreter, its packages, and the system's libraries."""
  python = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix} - {"/"}
  paths = {*SYSTEM, *python, *map(os.path.realpath, python)}
  return sorted(path for path in paths if os.path.exists(path))


def main() -> None:
  """Run the program of the input in a process of its own; when it ends, end all processes that it has started."""
  arguments = [int(argument) for argument in sys.argv[1:]]
  prctl(DEATH_SIGNAL, signal.SIGKILL)  # when the parent dies, nobody waits for this process
  prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
  program, call = json.load(sys.stdin) if arguments else ("", "")
  out = os.dup(1)
  null = os.open(os.devnull, os.O_RDWR)
  os.dup2(null, 0)
  os.dup2(null, 1)
  closed = enter_namespaces()
  if "processes" not in closed and prctl(SUBREAPER, 1) == 0:
    closed["children"] = "watched"
  child = os.fork()
  if child:
    leave(wait_for(child))
  os.setsid()
  prctl(DEATH_SIGNAL, signal.SIGKILL)
  if "processes" in closed:  # signals without a handler do not reach a namespace's first process
    child = os.fork()
    if child:
      leave(wait_for(child))
    prctl(DEATH_SIGNAL, signal.SIGKILL)
  closed |= close_files(is_new_mount="mounts" in closed)
  drop_privileges()
  closed = refuse_calls() | closed
  if arguments:
    limit(*arguments, processes=PROCESSES if "processes" in closed else None)
    answer(program, call, out)
  os.write(out, json.dumps(closed).encode())
  os._exit(0)


def wait_for(child: int) -> int:
  """Wait for a process, end its orphans, which become children of this process, and return its status."""
  while True:
    pid, status = os.wait()
    if pid == child:
      break
  with contextlib.suppress(OSError):
    while orphans := children(os.getpid()):
      for pid in orphans:
        with contextlib.suppress(ProcessLookupError):
          os.killpg(pid, signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)
      os.wait()
  return status


def children(parent: int) -> list[int]:
  """Return the children of a process that have not ended; none where the system does not list them."""
  found = []
  for pid in filter(str.isdigit, os.listdir("/proc")):
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
      state, ppid = file.read().rpartition(b")")[2].split()[:2]
      if int(ppid) == parent and state != b"Z":
        found.append(int(pid))
  return found


def leave(status: int) -> None:
  """Exit with the exit code of a wait status, or 128 + its signal."""
  os._exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))


def enter_namespaces() -> dict[str, str]:
  """Leave the network, the processes and the mounts of the machine, all or none; return what is isolated, and how."""
  user, group = os.geteuid(), os.getegid()
  if sys.platform != "linux" or libc.unshare(NEW_USER | NEW_MOUNT | NEW_PID | NEW_NET | NEW_IPC):
    return {}
  with contextlib.suppress(OSError):
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
      with open(f"/proc/self/{name}", "w") as file:
        file.write(text)
  return dict.fromkeys(("network", "processes", "mounts"), "namespace")


def close_files(*, is_new_mount: bool) -> dict[str, str]:
  """Hide the files that a program need not read and forbid writes outside its folder; return how it was done."""
  closed = {}
  work = os.getcwd()
  if is_new_mount:
    with contextlib.suppress(OSError):
      new_root(work)
      work, closed["files"] = "/folder", "mounts"
  with contextlib.suppress(OSError):
    closed |= restrict(work)
  return closed


def new_root(folder: str) -> None:
  """Make a root of a few read-only folders and an empty `/folder`. Raises OSError without any visible change."""

  def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
    check(libc.mount(*encoded[:3], ctypes.c_ulong(flags), encoded[3]))

  def seal(path: str, flags: int) -> None:
    attributes = struct.pack("QQQQ", READ_ONLY | NO_SETUID, 0, 0, 0)
    check(libc.syscall(MOUNT_SETATTR, -100, os.fsencode(path), flags, attributes, len(attributes)))

  pivot_root = PIVOT_ROOT.get(os.uname().machine)
  if pivot_root is None:
    raise OSError("the number of pivot_root is not known here")
  mount("none", "/", None, PRIVATE | RECURSIVE)
  mount("tmpfs", folder, "tmpfs", 0, "size=64k,nr_inodes=4096,mode=755")
  for path in (*readable(), *DEVICES):
    target = folder + path
    if os.path.isdir(path):
      os.makedirs(target, exist_ok=True)
    else:
      os.makedirs(os.path.dirname(target), exist_ok=True)
      os.close(os.open(target, os.O_CREAT | os.O_RDONLY, 0o444))
    if not os.path.ismount(target):
      mount(os.path.realpath(path), target, None, BIND | RECURSIVE)
      if path not in DEVICES:
        seal(target, AT_RECURSIVE)
  os.mkdir(f"{folder}/folder")
  seal(folder, 0)
  mount("tmpfs", f"{folder}/folder", "tmpfs", 0, "size=64k,nr_inodes=1024,mode=777")
  os.chdir(folder)
  check(libc.syscall(pivot_root, b".", b"."))  # the old root now covers the new one, and is unmounted
  check(libc.umount2(b".", DETACH))
  os.chdir("/folder")


def restrict(folder: str) -> dict[str, str]:
  """Let Landlock (Linux 5.13) refuse files, from version 4 on also TCP, from 6 on also signals to other processes.

  Raises OSError where the system has no Landlock.
  """
  if sys.platform != "linux":
    raise OSError("Landlock is of Linux")
  version = check(libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), 1))
  rights = ALL | sum(right for since, right in SINCE.items() if version >= since)
  attributes = struct.pack("QQQ", rights, 0b11 if version >= 4 else 0, 0b11 if version >= 6 else 0)
  rules = check(
    libc.syscall(CREATE_RULESET, attributes, ctypes.c_size_t(8 if version < 4 else 16 if version < 6 else 24), 0)
  )
  allowed = [(path, READ) for path in readable()] + [(path, READ | WRITE) for path in DEVICES] + [(folder, rights)]
  for path, wanted in allowed:
    with contextlib.suppress(OSError):
      file = os.open(path, os.O_PATH | os.O_CLOEXEC)
      if not os.path.isdir(path):
        wanted &= 0b111 | 1 << 14  # the rights that apply to files
      check(libc.syscall(ADD_RULE, rules, 1, struct.pack("=Qi", wanted & rights, file), 0))
      os.close(file)
  check(libc.syscall(RESTRICT_SELF, rules, 0))
  os.close(rules)
  closed = {"files": "Landlock"}
  return closed | ({"tcp": "Landlock"} if version >= 4 else {}) | ({"signals": "Landlock"} if version >= 6 else {})


def refuse_calls() -> dict[str, str]:
  """Let seccomp refuse system calls permanently; of socket pairs only connected streams stay allowed."""
  machine = os.uname().machine
  if sys.platform != "linux" or machine not in REFUSED:
    return {}
  refused = REFUSED[machine]
  allow, refuse = len(refused) + 8, len(refused) + 9  # places of the last two instructions
  # (code, steps to skip if true, if false, operand); a call has its number at 0, architecture at 4, socket type at 24
  steps = [(LOAD, 0, 0, 4), (EQUAL, 0, refuse - 2, ARCHITECTURE[machine]), (LOAD, 0, 0, 0)]
  steps.append((AT_LEAST, refuse - 4, 0, OTHER_ABI))
  steps += [(EQUAL, refuse - place - 1, 0, call) for place, call in enumerate(refused, len(steps))]
  steps += [(EQUAL, 0, allow - len(steps) - 1, SOCKETPAIR[machine]), (LOAD, 0, 0, 24), (AND, 0, 0, 0xF)]
  steps += [(EQUAL, 0, 1, STREAM), (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, REFUSE)]
  code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
  program = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code))
  is_refused = prctl(SECCOMP, FILTER, program) == 0
  return {"network": "seccomp"} if is_refused else {}


def drop_privileges() -> None:
  """Give up the capabilities that a namespace granted; starting a new program does not bring them back."""
  if sys.platform == "linux":
    libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24))


def limit(seconds: int, megabytes: int, processes: int | None) -> None:
  """Set the limits that the system has; that of `processes` only in a namespace, where no others are counted."""
  size = megabytes << 20
  limits = {
    "CPU": (seconds, seconds + 5),
    "AS": (size, size),
    "FSIZE": (0, 0),
    "CORE": (0, 0),
    "NOFILE": (FILES, FILES),
  }
  if processes is not None:
    limits["NPROC"] = (processes, processes)
  for name, values in limits.items():
    with contextlib.suppress(ValueError, OSError):
      resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), values)
  signal.alarm(2 * seconds)


def answer(program: str, call: str, out: int) -> None:
  """Run a program, evaluate a call, write the result or the error to `out`, and exit."""
  try:
    scope = {"__name__": "program"}
    exec(compile(program, "program", "exec"), scope)
    text = repr(eval(call, scope))
  except BaseException as error:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "program"]
    text = f"raised {type(error).__name__}: {error}" + (f" (line {lines[-1]})" if lines else "")
  data = text[:LONGEST].encode("utf-8", "backslashreplace")
  while data:
    data = data[os.write(out, data) :]
  os._exit(0)


if __name__ == "__main__":
  main()
