"""What a user can mend is one line, whatever raised it."""

import pytest

from launch.command import _one_line


def raises(error):
  def main(argv):
    raise error

  return main


def test_a_missing_extra_is_named_with_its_command():
  with pytest.raises(SystemExit, match=r"error: gguf is not installed: pip install -e '\.\[weights\]'"):
    _one_line(raises(ModuleNotFoundError("No module named 'gguf'", name="gguf")), [])


def test_a_bug_keeps_its_traceback():
  with pytest.raises(ModuleNotFoundError):
    _one_line(raises(ModuleNotFoundError("No module named 'selfrag_jax.x'", name="selfrag_jax.x")), [])


def test_ctrl_c_is_one_line_and_the_code_of_shells(capsys):
  with pytest.raises(SystemExit) as stopped:
    _one_line(raises(KeyboardInterrupt("stopped; step 5 is saved")), [])
  assert stopped.value.code == 130
  assert capsys.readouterr().err == "stopped; step 5 is saved\n"
