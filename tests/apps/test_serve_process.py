"""The process of the server: how it starts, what it refuses, how it is stopped, and what is there after `kill -9`."""

import contextlib
import re
import signal
import socket
import sys
import threading
import time

import httpx
import pytest

from configs import memory
from selfrag_jax.experiments import self_rag
from selfrag_jax.memory.store import MemoryStore
from selfrag_jax.model.export import export_safetensors
from tests.generate.models import tiny
from tests.launching import ROOT, launch
from tests.serving import KEY, MODEL, Process, build, process

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "temperature": 0}


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
  """A run of the Self-RAG phases, whose model has a tokenizer."""
  folder = tmp_path_factory.mktemp("run") / "small"
  config = memory.get_config()
  config.model.update(d_model=16, n_layers=1, n_heads=2, block_pattern="T", mlp_dim=16)
  config.data.update(n_facts=16, n_questions=2, text=({"n_facts": 4},))
  config.pretrain.update(steps=2, batch_size=8, valid_rows=8, needed_loss=0.0)
  config.memory.update(steps=2, batch_size=8, needed_loss=0.0)
  self_rag.run(self_rag.build(config.to_dict()), folder)
  return folder


def test_the_launcher_serves_a_run_and_its_places(workdir, tmp_path):
  keys = tmp_path / "keys"
  keys.write_text(f"{KEY}\n")
  keys.chmod(0o600)
  flags = [f"--model={workdir}", "--port=0", f"--memory={tmp_path / 'memory'}", f"--api_keys={keys}", "--name=mine"]
  flags.append(f"--knowledge_base=facts={build(tmp_path / 'facts')}")
  server = Process([sys.executable, str(ROOT / "launch" / "serve.py"), *flags])
  with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60) as client:
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["mine", "hashing-1024-2-0.5"]
    body = {"model": "mine", "prompt": "Ada Baker:", "max_tokens": 2, "temperature": 0}
    assert client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] > 0
    found = client.post("/v1/search", json={"query": "Oslo", "knowledge_base": "facts"}).json()["data"]
    assert found[0]["title"] == "Norway"
    assert client.post("/v1/memory", json={"text": "a fact"}).status_code == 201
    # a word that the run's tokenizer does not have is the client's mistake
    assert client.post("/v1/completions", json={**body, "prompt": "zzz"}).status_code == 400
  errors = server.stop()
  assert server.popen.returncode == 0
  assert errors == ""
  assert MemoryStore.load(str(tmp_path / "memory"), read_only=True).chunks == ["a fact"]


@pytest.fixture(scope="module")
def held(tmp_path_factory):
  """The port and the memory of another server, which runs."""
  folder = tmp_path_factory.mktemp("held") / "memory"
  with process(memory=str(folder)) as server:
    yield {"PORT": server.url.rpartition(":")[2], "MEMORY": str(folder)}


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    (["--model="], "error: which model? --model=WORKDIR or a name"),
    (["--model=nowhere"], "error: nowhere does not exist"),
    (["--port=PORT"], "error: port PORT of 127.0.0.1 is in use: give another --port, 0 for a free one"),
    (["--port=70000"], "error: --port=70000: ports go up to 65535"),
    (["--memory=MEMORY"], "error: MEMORY is in use by pid"),
    (["--memory=configs"], "the folder holds no store"),
    (["--host=0.0.0.0"], "there are no API keys: give --api_keys=FILE, or SELFRAG_API_KEYS"),
    (["--host=example.invalid", "--api_keys=GOOD"], "error: example.invalid:0 cannot be listened to: "),
    (["--api_keys=nothing"], "No such file or directory: 'nothing'"),
    (["--api_keys=EMPTY"], "error: EMPTY has no API key; write one a line"),
    (["--knowledge_base=KB"], "error: --knowledge_base=KB: write NAME=FOLDER"),
    (["--knowledge_base=kb=configs"], "configs has no manifest.json: it is no knowledge base, or building it has not"),
    (["--encoder=hashing-0"], "hashing-0"),
    (["--max_waiting=-1"], "error: max_waiting is -1; it must be a whole number, at least 0"),
    (["--request_seconds=nan"], "error: request_seconds is nan; it must be"),
    (["--context_tokens=-3"], "error: flag --context_tokens=-3: -3 is not a positive integer"),
    (["--modle=1"], "error: Unknown command line flag 'modle'. Did you mean: model ?"),
  ],
)
def test_a_mistake_is_one_line(workdir, held, tmp_path, flags, message):
  (tmp_path / "EMPTY").write_text("\n")
  (tmp_path / "GOOD").write_text(KEY)
  (tmp_path / "GOOD").chmod(0o600)
  names = {"EMPTY": str(tmp_path / "EMPTY"), "GOOD": str(tmp_path / "GOOD"), **held}
  filled = lambda text: re.sub(r"\b(?:EMPTY|GOOD|PORT|MEMORY)\b", lambda found: names[found[0]], text)
  run = launch("launch/serve.py", f"--model={workdir}", "--port=0", *map(filled, flags))
  assert run.returncode == 1
  assert filled(message) in run.stderr
  assert run.stdout == ""
  assert len(run.stderr.splitlines()) == 1


def test_a_model_without_a_tokenizer_is_refused(tmp_path):
  model, folder = tiny("attention"), tmp_path / "model"
  export_safetensors(folder, model.config, model.params)
  run = launch("launch/serve.py", f"--model={folder}", "--port=0")
  assert run.stderr.startswith(f"error: {folder} holds no tokenizer: put its tokenizer.json beside the weights")
  assert len(run.stderr.splitlines()) == 1


def refuses(url, seconds=20):
  """Return whether a server takes no more connections within this time."""
  end = time.monotonic() + seconds
  while time.monotonic() < end:
    try:
      httpx.get(url)
    except httpx.ConnectError:
      return True
    except httpx.TransportError:  # taken, and dropped when it stopped
      pass
    time.sleep(0.05)
  return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_server_finishes_what_runs(number, tmp_path):
  with process(memory=str(tmp_path / "memory"), settings={"shutdown_seconds": 30}) as server:
    body = {**CHAT, "max_tokens": 480, "stream": True, "n": 4, "temperature": 1, "seed": 3}
    with httpx.Client(base_url=server.url, timeout=60) as client:
      client.post("/v1/memory", json={"text": "a fact"})
      with client.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        server.popen.send_signal(number)
        assert refuses(f"{server.url}/health")
        *_, last = [line for line in lines if line]
        assert last == "data: [DONE]"
    server.popen.wait(30)
    assert server.popen.returncode == 0
    server._reader.join(5)
    assert server.errors == ""
  with MemoryStore.load(str(tmp_path / "memory")) as store:  # the folder was given back
    assert store.chunks == ["a fact"]


def test_a_stopped_server_does_not_wait_forever():
  with process(settings={"shutdown_seconds": 1}) as server, httpx.Client(base_url=server.url, timeout=60) as client:
    body = {**CHAT, "max_tokens": 480, "stream": True, "n": 50, "temperature": 1}
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
      lines = response.iter_lines()
      next(lines)
      began = time.monotonic()
      server.popen.send_signal(signal.SIGTERM)
      with contextlib.suppress(httpx.RemoteProtocolError):
        assert "data: [DONE]" not in list(lines)
    server.popen.wait(30)
    assert time.monotonic() - began < 15
    assert server.popen.returncode == 0


def test_a_client_that_sends_slowly_or_not_at_all_is_not_waited_for():
  with process(settings={"body_seconds": 0.3}) as server:
    address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    with socket.create_connection(address, 10) as slow:
      slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
      assert b" 408 " in slow.recv(4096)
    with socket.create_connection(address, 10) as broken:
      broken.sendall(b"nonsense\r\n\r\n")
      assert b" 400 " in broken.recv(4096)
    assert httpx.get(f"{server.url}/health").status_code == 200


@pytest.mark.slow
def test_after_kill_9_the_memory_is_as_it_was_acknowledged(tmp_path):
  acknowledged: dict[str, str] = {}
  unsure: dict[str, str | None] = {}
  for round in range(4):
    with process(memory=str(tmp_path / "memory")) as server:
      killer = threading.Timer(1.0 + round / 3, server.popen.kill)
      killer.start()
      with httpx.Client(base_url=server.url, timeout=30) as client:
        listed = {each["id"]: each["text"] for each in client.get("/v1/memory?limit=1000").json()["data"]}
        _compare(listed, acknowledged, unsure)
        acknowledged, unsure = listed, {}
        with contextlib.suppress(httpx.TransportError):
          for n in range(100_000):
            _change(client, n, acknowledged, unsure)
      assert server.popen.wait(30) == -signal.SIGKILL
  with MemoryStore.load(str(tmp_path / "memory")) as store:
    _compare(dict(zip(store.ids, store.chunks, strict=True)), acknowledged, unsure)
  assert len(acknowledged) > 20


def _change(client, n, acknowledged, unsure):
  """Make a change, and note it as unsure until it is acknowledged."""
  unsure.clear()
  if n % 7 == 5:
    id = next(iter(acknowledged))
    unsure[id] = None
    assert client.delete(f"/v1/memory/{id}").status_code == 200
    del acknowledged[id]
  elif n % 7 == 6:
    id = next(iter(acknowledged))
    unsure[id] = f"changed {n}"
    assert client.put(f"/v1/memory/{id}", json={"text": f"changed {n}"}).status_code == 200
    acknowledged[id] = f"changed {n}"
  else:
    unsure["new"] = f"fact {n}"
    acknowledged[client.post("/v1/memory", json={"text": f"fact {n}"}).json()["id"]] = f"fact {n}"
  unsure.clear()


def _compare(found, acknowledged, unsure):
  """Check that what was acknowledged is there, and nothing else but the one change that was not answered."""
  different = {id for id in found.keys() | acknowledged.keys() if found.get(id) != acknowledged.get(id)}
  assert len(different) <= len(unsure)
  for id in different:
    assert found.get(id) in unsure.values()
