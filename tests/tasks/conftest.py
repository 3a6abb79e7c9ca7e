"""Fixtures of the sandbox on systems that refuse a part of it."""

import pytest

from selfrag_jax.tasks import programs
from selfrag_jax.tasks.programs import isolation


@pytest.fixture
def without(monkeypatch):
  """Return a function that has tests run as on a system that refuses namespaces, Landlock or seccomp."""

  def refuse(folder, refused):
    code = programs.SANDBOX.read_text()
    if "unshare" in refused:
      code = code.replace('if sys.platform != "linux" or libc.unshare', "if True or libc.unshare")
      assert "if True or" in code
    if "Landlock" in refused:
      code = code.replace("version = check(libc.syscall(", "version = check(-1 + 0 * libc.syscall(")
      assert "check(-1 + 0" in code
    if "seccomp" in refused:
      code = code.replace("is_refused = prctl(", "is_refused = False and prctl(")
      assert "False and prctl(" in code
    (folder / "sandbox.py").write_text(code)
    monkeypatch.setattr(programs, "SANDBOX", folder / "sandbox.py")
    isolation.cache_clear()

  yield refuse
  isolation.cache_clear()
