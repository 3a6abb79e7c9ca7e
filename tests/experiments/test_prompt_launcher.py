"""`launch/optimize_prompt.py` as a user meets it: stopped, killed, out of budget, or with a mistake in the flags."""

import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import selfrag_jax.textgrad as tg
from tests import launching

ROOT = Path(__file__).resolve().parents[2]


def launch(workdir, *flags, variant="", **options):
  config = f"--config={ROOT / 'configs' / 'gradient_rag.py'}{variant}"
  command = [sys.executable, ROOT / "launch" / "optimize_prompt.py", config]
  return subprocess.Popen(
    [*command, f"--workdir={workdir}", *flags], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
  )


class Answers(http.server.BaseHTTPRequestHandler):
  """A server that answers at once; `server.answered` counts."""

  def do_POST(self):
    self.rfile.read(int(self.headers["Content-Length"]))
    message = {"role": "assistant", "content": f"<IMPROVED_VARIABLE>{self.server.answered}</IMPROVED_VARIABLE>"}
    usage = {"prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14}
    choices = [{"index": 0, "finish_reason": "stop", "message": message}]
    answer = {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": choices, "usage": usage}
    data = json.dumps(answer).encode()
    self.send_response(200)
    self.send_header("Content-Type", "application/json")
    self.send_header("Content-Length", str(len(data)))
    self.end_headers()
    with self.server.lock:
      self.server.answered += 1
    self.wfile.write(data)

  def log_message(self, *arguments):
    pass


def test_after_kill_9_of_the_launcher_what_was_paid_is_booked(tmp_path, behind_endpoints):
  with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
    server.answered, server.lock = 0, threading.Lock()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    flags = [f"--config.task.path={behind_endpoints['task']['path']}", "--config.task.sizes.valid=150"]
    for part in ("model", "critic", "optimizer"):
      flags += [f"--config.engines.{part}.name=m"]
      flags += [f"--config.engines.{part}.base_url=http://127.0.0.1:{server.server_port}/v1"]
    flags += ["--config.task.sizes.train=50", "--config.task.sizes.test=50"]
    process = launch(tmp_path / "run", *flags, variant=":bbh")
    while server.answered < 60 and process.poll() is None:  # before the first step has ended
      time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    time.sleep(0.2)  # for requests that were on their way
    server.shutdown()
  account = tg.Account()
  account.keep(tg.EngineCache(str(tmp_path / "run" / "answers.sqlite")))
  assert server.answered >= 60
  assert server.answered - 8 <= account.calls <= server.answered  # 8 at once: each may have been on its way
  assert account.tokens == 14 * account.calls


def test_the_launcher_says_that_the_budget_ended_the_run(tmp_path):
  flags = ["--config.budget.tokens=30000", "--config.task.n_topics=8", "--config.optimizer.steps=1000"]
  process = launch(tmp_path / "run", *flags)
  _, err = process.communicate(timeout=240)
  assert process.returncode == 1
  assert "the budget ended the run after" in err.splitlines()[-1]
  assert "Traceback" not in err
  assert {"report.html", "prompt.txt", "prompt_optimization.csv", "prompt_optimization.json"} <= {
    file.name for file in (tmp_path / "run").iterdir()
  }


def test_the_launcher_says_what_programs_can_reach(tmp_path):
  flags = ["--config.optimizer.steps=0", "--config.task.sizes.valid=1", "--config.task.sizes.test=1"]
  config = "--config=configs/gradient_rag.py:program"
  done = launching.launch("launch/optimize_prompt.py", config, f"--workdir={tmp_path}", *flags)
  assert done.returncode == 0, done.stderr
  assert done.stderr.count("programs have limits of time and memory; they ") == 1


def test_the_launcher_goes_on_after_kill_9(tmp_path):
  flags = ["--config.optimizer.steps=4000", "--config.task.n_topics=8"]
  process = launch(tmp_path / "run", *flags)
  state = tmp_path / "run" / "state.json"
  while not state.exists() and process.poll() is None:
    time.sleep(0.05)
  os.kill(process.pid, signal.SIGKILL)
  process.communicate()
  done = json.loads(state.read_text())["step"]
  assert done < 4000
  process = launch(tmp_path / "run", f"--config.optimizer.steps={done + 20}", flags[1])
  out, err = process.communicate(timeout=240)
  assert process.returncode == 0, err
  assert "report.html" in out
  assert len(json.loads((tmp_path / "run" / "prompt_optimization.json").read_text())["valid"]) == done + 21


def test_ctrl_c_at_the_launcher_keeps_what_was_done(tmp_path):
  flags = ["--config.optimizer.steps=4000", "--config.task.n_topics=8"]
  heard = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # in the background, shells have it ignored
  process = launch(tmp_path / "run", *flags, preexec_fn=heard)
  state = tmp_path / "run" / "state.json"
  while not (state.exists() and json.loads(state.read_text())["step"] > 3) and process.poll() is None:
    time.sleep(0.05)
  process.send_signal(signal.SIGINT)
  _, err = process.communicate(timeout=60)
  assert process.returncode == 130
  assert "Traceback" not in err
  done = json.loads(state.read_text())["step"]
  assert 3 < done < 4000
  process = launch(tmp_path / "run", f"--config.optimizer.steps={done + 2}", *flags[1:])
  _, err = process.communicate(timeout=240)
  assert process.returncode == 0, err
  report = json.loads((tmp_path / "run" / "prompt_optimization.json").read_text())
  assert len(report["valid"]) == done + 3


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    (["--compare=retrieval,al"], "error: --compare=retrieval,al: give at least two of none, window, retrieval"),
    (["--compare=none,none"], "error: --compare=none,none: give at least two"),
    (["--compare="], "error: --compare=: give at least two"),
    (["--config.budget.tokens=9000"], "error: the call may bring the run to 9,"),
    (
      ["--config.engines.critic.name=m", "--config.engines.critic.base_url=http://127.0.0.1:9/v1"],
      "error: m at http://127.0.0.1:9/v1 could not be asked",
    ),
    (["--config.engines.critic.name=m"], "error: unknown engine 'm': give a model such as"),
  ],
)
def test_mistakes_at_the_launcher_are_one_line(tmp_path, flags, message):
  process = launch(tmp_path / "run", *flags)
  _, err = process.communicate(timeout=240)
  assert process.returncode == 1
  assert err.splitlines()[-1].startswith(message)
  assert "Traceback" not in err
