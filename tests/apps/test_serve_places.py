"""Knowledge bases, the memory, sources of answers, embeddings, models and the page of the server."""

import base64
import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from selfrag_jax.apps.serve import grounded, knowledge, page
from selfrag_jax.apps.serve.errors import APIError
from selfrag_jax.apps.serve.memory import open_memory
from selfrag_jax.encoders.hashed_words import HashingEncoder
from selfrag_jax.memory.store import MemoryStore
from selfrag_jax.retrieval.base import load
from selfrag_jax.storage.lock import FolderInUseError
from tests.serving import FACTS, MODEL, ROOT, build, client, services

ASKED = {"model": MODEL, "messages": [{"role": "user", "content": "Where do ships land?"}], "max_tokens": 8}
ENCODER = HashingEncoder()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return build(tmp_path_factory.mktemp("bases") / "facts")


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
  with client(memory=str(tmp_path_factory.mktemp("memory") / "kept"), knowledge_bases=(f"facts={folder}",)) as made:
    yield made


@pytest.fixture
def fresh(tmp_path):
  """A server with an empty memory."""
  with client(memory=str(tmp_path / "kept")) as made:
    yield made


def test_a_search_finds_what_the_library_finds(server, folder):
  expected = load(folder).retrieve("Where is Oslo?", 2)
  reply = server.post("/v1/search", json={"query": "Where is Oslo?", "knowledge_base": "facts", "top_k": 2}).json()
  assert [(found["id"], found["score"]) for found in reply["data"]] == [(d.id, d.score) for d in expected]
  first = reply["data"][0]
  assert (first["title"], first["text"]) == ("Norway", "Oslo is the capital of Norway.")
  assert first["source"]
  assert first["metadata"]["year"] == 2005


def test_a_search_can_be_filtered(server):
  body = {"query": "Oslo Bergen ships", "knowledge_base": "facts"}
  found = server.post("/v1/search", json={**body, "where": {"year": {"$gte": 2000}}}).json()["data"]
  assert {each["id"] for each in found} == {"2", "3"}
  for where in ({"yaer": 1}, {"year": {"$near": 1}}, {"year": {"$gt": []}}, {"$or": []}):
    refused = server.post("/v1/search", json={**body, "where": where})
    assert refused.status_code == 400
    assert refused.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
  "body", [{}, {"memory": False}, {"memory": True, "knowledge_base": "facts"}, {"knowledge_base": "facts", "top_k": 0}]
)
def test_a_search_names_one_place(server, body):
  assert server.post("/v1/search", json={"query": "x", **body}).status_code == 400


def test_an_unknown_knowledge_base_is_a_404(server):
  for path, body in (("/v1/search", {"query": "x"}), ("/v1/chat/completions", ASKED)):
    refused = server.post(path, json={**body, "knowledge_base": "fact"})
    assert refused.status_code == 404
    assert refused.json()["error"]["message"] == "there is no knowledge base 'fact'; there are facts"
  assert server.get("/v1/knowledge_bases").json()["data"] == [
    {"id": "facts", "object": "knowledge_base", "documents": 3}
  ]


def test_an_answer_from_a_knowledge_base_has_its_sources(server):
  reply = server.post("/v1/chat/completions", json={**ASKED, "knowledge_base": "facts", "top_k": 2}).json()
  first = reply["sources"][0]
  assert {"number", "id", "title", "text", "source", "score", "is_cited"} <= set(first)
  assert (first["number"], first["id"], first["text"]) == (1, "1", FACTS[0]["content"])
  assert isinstance(first["is_cited"], bool)
  assert reply["usage"]["prompt_tokens"] > len(FACTS[0]["content"])  # the model read it
  body = {**ASKED, "knowledge_base": "facts", "top_k": 2, "temperature": 0}
  reply = server.post("/v1/chat/completions", json=body).json()
  events = server.post("/v1/chat/completions", json={**body, "stream": True}).text.strip().split("\n\n")
  chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
  assert events[-1] == "data: [DONE]"
  assert ["sources" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
  assert chunks[-1]["sources"] == reply["sources"]
  text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
  assert text == reply["choices"][0]["message"]["content"]


def test_an_answer_from_nothing_is_that_there_is_none(fresh):
  reply = fresh.post("/v1/chat/completions", json={**ASKED, "memory": True}).json()
  assert reply["sources"] == []
  assert reply["choices"][0]["message"]["content"] == "I do not know."
  fresh.post("/v1/memory", json={"text": "Ships land in Cadiz.", "source": "atlas"})
  reply = fresh.post("/v1/chat/completions", json={**ASKED, "memory": True}).json()
  assert [(source["text"], source["source"]) for source in reply["sources"]] == [("Ships land in Cadiz.", "atlas")]


@pytest.mark.parametrize("changes", [{"n": 2}, {"logprobs": True}, {"messages": [{"role": "system", "content": "x"}]}])
def test_what_an_answer_with_sources_does_not_have_is_refused(server, changes):
  assert server.post("/v1/chat/completions", json={**ASKED, "knowledge_base": "facts", **changes}).status_code == 400


def test_a_question_that_does_not_fit_is_refused(server):
  body = {**ASKED, "knowledge_base": "facts", "messages": [{"role": "user", "content": "ships " * 200}]}
  refused = server.post("/v1/chat/completions", json=body)
  assert refused.status_code == 400
  assert "tokens" in refused.json()["error"]["message"]


def test_a_place_is_free_once_a_client_has_heard_of_the_end(server, monkeypatch):
  taken, give, settle = [], grounded.Answering.give, grounded._settle

  def noted(answering, delta):
    if isinstance(delta, APIError) or delta.finish_reason:
      taken.append(server.services.writer.open)
    give(answering, delta)

  def settled(future, error):
    if error is not None:
      taken.append(server.services.writer.open)
    settle(future, error)

  monkeypatch.setattr(grounded.Answering, "give", noted)
  monkeypatch.setattr(grounded, "_settle", settled)
  for words, status, times in ((1, 200, 1), (200, 400, 2)):  # one that is answered, one that is refused
    taken.clear()
    body = {**ASKED, "knowledge_base": "facts", "messages": [{"role": "user", "content": "ships " * words}]}
    assert server.post("/v1/chat/completions", json=body).status_code == status
    wait(lambda times=times: len(taken) == times)
    assert set(taken) == {0}


@pytest.mark.parametrize("raised", [SystemExit(3), StopIteration("x"), KeyboardInterrupt(), RuntimeError("a secret")])
def test_whatever_a_search_raises_is_told(server, monkeypatch, raised):
  def broken(*_, **__):
    raise raised

  monkeypatch.setattr(grounded, "stream_answer", broken)
  failed = server.post("/v1/chat/completions", json={**ASKED, "knowledge_base": "facts"})
  assert failed.status_code == 500
  assert failed.json()["error"]["message"] == "the server failed; its log says why"
  wait(lambda: server.services.writer.open == 0)
  assert server.get("/health").status_code == 200


def test_a_search_that_takes_too_long_is_ended(folder, monkeypatch):
  go_on = threading.Event()
  monkeypatch.setattr(grounded, "stream_answer", lambda *_, **__: go_on.wait(60))
  with client(knowledge_bases=(f"facts={folder}",), settings={"request_seconds": 0.2}) as made:
    refused = made.post("/v1/chat/completions", json={**ASKED, "knowledge_base": "facts"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (504, "timeout")
    assert made.services.writer.open == 1  # its thread still works
    go_on.set()
    wait(lambda: made.services.writer.open == 0)


def test_the_memory_is_listed_changed_and_forgotten(fresh):
  made = [fresh.post("/v1/memory", json={"text": f"fact {n}", "source": "me"}) for n in range(5)]
  assert [each.status_code for each in made] == [201] * 5
  ids = [each.json()["id"] for each in made]
  listed = fresh.get("/v1/memory?limit=2&offset=1").json()
  assert listed["total"] == 5
  assert [each["text"] for each in listed["data"]] == ["fact 3", "fact 2"]  # the newest first
  assert listed["data"][0]["source"] == "me"
  changed = fresh.put(f"/v1/memory/{ids[0]}", json={"text": "Oslo is in Norway"}).json()
  assert (changed["id"], changed["text"], changed["source"]) == (ids[0], "Oslo is in Norway", "me")
  found = fresh.get("/v1/memory", params={"query": "Where is Oslo?"}).json()
  assert [each["id"] for each in found["data"]] == [ids[0]]
  assert found["total"] == 1
  assert found["data"][0]["score"] > 0
  assert fresh.get("/v1/memory", params={"query": "submarine"}).json()["data"] == []
  assert fresh.delete(f"/v1/memory/{ids[0]}").json()["deleted"] is True
  for response in (
    fresh.delete(f"/v1/memory/{ids[0]}"),
    fresh.put(f"/v1/memory/{ids[0]}", json={"text": "x"}),
    fresh.get(f"/v1/memory/{ids[0]}"),
  ):
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "memory_not_found"
  assert fresh.get("/v1/memory").json()["total"] == 4


def test_a_key_keeps_the_newest_text(fresh):
  for text in ("The port is Bergen.", "The port is Cadiz."):
    assert fresh.post("/v1/memory", json={"text": text, "key": "port"}).status_code == 201
  assert [each["text"] for each in fresh.get("/v1/memory").json()["data"]] == ["The port is Cadiz."]


@pytest.mark.parametrize("body", [{}, {"text": ""}, {"text": " \n"}, {"text": "\ud800"}, {"text": "a", "key": ""}])
def test_a_text_that_cannot_be_remembered_is_refused(fresh, body):
  sent = fresh.post("/v1/memory", content=json.dumps(body), headers={"Content-Type": "application/json"})
  assert sent.status_code == 400
  assert fresh.get("/v1/memory").json()["total"] == 0


def test_a_full_disk_is_told_and_nothing_is_remembered(fresh, monkeypatch):
  def full(*_):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(fresh.services.memory.store._journal, "append", full)
  sent = fresh.post("/v1/memory", json={"text": "a"})
  assert sent.status_code == 507
  assert "No space left on device" in sent.json()["error"]["message"]
  assert fresh.get("/v1/memory").json()["total"] == 0


def test_a_server_without_a_memory_says_so():
  with client() as made:
    for response in (
      made.get("/v1/memory"),
      made.post("/v1/search", json={"query": "x", "memory": True}),
      made.post("/v1/chat/completions", json={**ASKED, "memory": True}),
    ):
      assert response.status_code == 404
      assert "start it with --memory=FOLDER" in response.json()["error"]["message"]


def test_a_memory_of_another_encoder_or_another_server_is_refused(tmp_path):
  MemoryStore(1024, path=str(tmp_path / "other"), encoder=lambda texts: np.ones((len(texts), 1024))).add("a text")
  with pytest.raises(ValueError, match=r"was not written with the encoder hashing-1024-2-0\.5"):
    services(memory=str(tmp_path / "other"))
  MemoryStore(8, path=str(tmp_path / "narrow")).close()
  with pytest.raises(ValueError, match="was not written with the encoder"):
    services(memory=str(tmp_path / "narrow"))
  hold = "import sys, tests.serving as t; kept = t.services(memory=sys.argv[1]); print('held', flush=True); input()"
  command = [sys.executable, "-c", hold, str(tmp_path / "held")]
  holder = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
  assert holder.stdout.readline() == "held\n"
  with pytest.raises(FolderInUseError, match=f"in use by pid {holder.pid}"):
    open_memory(str(tmp_path / "held"), services().embedder)
  holder.communicate("\n")
  open_memory(str(tmp_path / "held"), services().embedder).close()


def test_texts_with_one_key_that_come_at_once_are_each_acknowledged(fresh):
  with ThreadPoolExecutor(8) as threads:
    post = lambda n: fresh.post("/v1/memory", json={"text": f"fact {n}", "key": "one"})
    made = list(threads.map(post, range(80)))
  assert [each.status_code for each in made] == [201] * 80
  assert [each.json()["text"] for each in made] == [f"fact {n}" for n in range(80)]
  assert fresh.get("/v1/memory").json()["total"] == 1


@pytest.mark.parametrize("error", [PermissionError("no"), OSError(5, "Input/output error")])
def test_a_folder_that_cannot_be_read_for_a_while_is_looked_at_again(tmp_path, monkeypatch, error):
  folder, read, looks = build(tmp_path / "facts"), knowledge.version, []
  with client(knowledge_bases=(f"facts={folder}",), settings={"reload_seconds": 0.05}) as made:

    def broken(folder):
      looks.append(folder)
      raise error

    monkeypatch.setattr(knowledge, "version", broken)
    build(tmp_path / "facts", [*FACTS, {"id": "4", "title": "", "content": "The submarine is yellow."}])
    wait(lambda: len(looks) > 4)
    assert 'outcome="failed"} 1.0' in made.get("/metrics").text  # the log is told once, not every two seconds
    monkeypatch.setattr(knowledge, "version", read)
    wait(lambda: 'outcome="loaded"} 1.0' in made.get("/metrics").text)


def test_each_version_that_cannot_be_loaded_is_told(tmp_path, monkeypatch):
  base, versions = knowledge.KnowledgeBase("facts", str(build(tmp_path / "facts"))), iter("aab")

  def broken(folder):
    raise OSError("no")

  monkeypatch.setattr(knowledge, "version", lambda folder: next(versions))
  monkeypatch.setattr(knowledge, "load", broken)
  assert [base.refresh() for _ in range(3)] == ["failed", None, "failed"]
  base.close()


def test_a_knowledge_base_that_is_rebuilt_is_served_until_the_new_one_is_there(tmp_path):
  folder = build(tmp_path / "facts")
  with client(knowledge_bases=(f"facts={folder}",), settings={"reload_seconds": 0.05}) as made:
    search = lambda query: [
      each["id"] for each in made.post("/v1/search", json={"query": query, "knowledge_base": "facts"}).json()["data"]
    ]
    assert search("submarine") == []
    build(tmp_path / "facts", [*FACTS, {"id": "4", "title": "", "content": "The submarine is yellow."}])
    wait(lambda: search("submarine") == ["4"])
    wait(lambda: 'knowledge_base_reloads_total{name="facts",outcome="loaded"} 1.0' in made.get("/metrics").text)
    # a version that cannot be read is told, and the old one stays
    manifest = tmp_path / "facts" / "manifest.json"
    whole = manifest.read_bytes()
    (tmp_path / "part").write_bytes(whole[:-20])
    (tmp_path / "part").replace(manifest)  # at once: what is half written would fail once more
    wait(lambda: 'outcome="failed"} 1.0' in made.get("/metrics").text)
    assert search("submarine") == ["4"]
    manifest.unlink()  # as when the folder is built anew from nothing
    time.sleep(0.2)
    assert search("Oslo") == ["2"]
    manifest.write_bytes(whole)
    wait(lambda: 'outcome="loaded"} 2.0' in made.get("/metrics").text)


def wait(holds, seconds=20):
  end = time.monotonic() + seconds
  while not holds():
    assert time.monotonic() < end
    time.sleep(0.05)


@pytest.mark.parametrize(
  ("named", "message"),
  [
    (["facts"], "write NAME=FOLDER"),
    (["a/b=x"], "write NAME=FOLDER"),
    (["a=FOLDER", "a=FOLDER"], "the name a is given twice"),
    (["a=nowhere"], "nowhere"),
  ],
)
def test_knowledge_bases_are_named_well(named, message, folder):
  with pytest.raises((ValueError, FileNotFoundError), match=message):
    services(knowledge_bases=tuple(each.replace("FOLDER", folder) for each in named))


def test_embeddings_are_those_of_the_encoder(server):
  texts = ["Where do ships land?", "Oslo"]
  body = {"model": ENCODER.name, "input": texts}
  expected = ENCODER(texts)
  reply = server.post("/v1/embeddings", json=body).json()
  assert [row["index"] for row in reply["data"]] == [0, 1]
  np.testing.assert_allclose([row["embedding"] for row in reply["data"]], expected, atol=1e-6)
  assert reply["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
  coded = server.post("/v1/embeddings", json={**body, "encoding_format": "base64", "dimensions": 1024}).json()
  rows = [np.frombuffer(base64.b64decode(row["embedding"]), "<f4") for row in coded["data"]]
  np.testing.assert_array_equal(rows, expected)
  one = server.post("/v1/embeddings", json={"model": ENCODER.name, "input": "Oslo"}).json()["data"]
  np.testing.assert_allclose(one[0]["embedding"], expected[1], atol=1e-6)


@pytest.mark.parametrize("changes", [{"input": []}, {"input": ["a", " "]}, {"dimensions": 8}, {"input": [1, 2]}])
def test_embeddings_of_what_is_no_text_are_refused(server, changes):
  body = {"model": ENCODER.name, "input": "a", **changes}
  assert server.post("/v1/embeddings", json=body).status_code == 400


def test_the_models_are_listed_by_kind(server):
  listed = server.get("/v1/models").json()
  assert [(model["id"], model["kind"]) for model in listed["data"]] == [(MODEL, "chat"), (ENCODER.name, "embeddings")]
  assert server.get(f"/v1/models/{MODEL}").json() == listed["data"][0]
  assert server.get("/v1/models/gpt-4").json()["error"]["code"] == "model_not_found"


def test_the_page_is_served_by_exact_names_with_a_strict_policy(tmp_path, monkeypatch):
  (tmp_path / "deep").mkdir()
  for name in ("index.html", "app.js", "style.css", "notes.txt", "deep/x.js"):
    (tmp_path / name).write_text(f"content of {name}")
  monkeypatch.setattr(page, "FOLDER", tmp_path)
  with client() as made:
    for path, name, kind in (
      ("/", "index.html", "text/html"),
      ("/index.html", "index.html", "text/html"),
      ("/app.js", "app.js", "text/javascript"),
      ("/style.css", "style.css", "text/css"),
    ):
      response = made.get(path)
      assert response.text == f"content of {name}"
      assert response.headers["content-type"].startswith(kind)
      policy = response.headers["content-security-policy"]
      assert "default-src 'none'" in policy
      assert "unsafe" not in policy
      assert made.head(path).text == ""
    for path in ("/notes.txt", "/deep/x.js", "/../setup.py", "/%2e%2e/setup.py", "/app.js/", "/APP.js"):
      assert made.get(path).status_code == 404, path
