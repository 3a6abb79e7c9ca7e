"""`HttpRetriever` over a server: the documents of a local retriever, for answers and for rollouts on the host."""

import jax
import numpy as np
import pytest

from selfrag_jax.answers import answer
from selfrag_jax.generate.engine import Engine
from selfrag_jax.generate.host_rollout import rollout_on_host
from selfrag_jax.generate.rollout import RolloutConfig
from selfrag_jax.model.lm import unstack
from selfrag_jax.retrieval import HttpRetriever, load
from tests.generate import test_rollout as rollouts
from tests.generate.models import tiny
from tests.serving import KEY, build, running

QUERY = "Where do ships land?"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
  """The address of a server, and a retriever of the knowledge base that it has."""
  folder = tmp_path_factory.mktemp("server")
  options = {"memory": str(folder / "memory"), "knowledge_bases": (f"facts={build(folder / 'facts')}",)}
  with running(**options, keys=(KEY,)) as (url, has):
    has.memory.store.add("Ships land in Bergen.", metadata={"source": "news"})
    yield url, load(folder / "facts")


@pytest.fixture(autouse=True)
def key(monkeypatch):
  monkeypatch.setenv("SELFRAG_API_KEY", KEY)


def test_the_documents_are_those_of_the_local_retriever(server):
  url, local = server
  remote = HttpRetriever(url, "facts")
  assert remote.retrieve(QUERY, 2) == local.retrieve(QUERY, 2)
  assert remote.retrieve_batch([QUERY, "", "Oslo"], 2) == local.retrieve_batch([QUERY, "", "Oslo"], 2)
  where = {"year": {"$gte": 2010}}
  assert remote.retrieve("Oslo Bergen", where=where) == local.retrieve("Oslo Bergen", where=where)
  (found,) = HttpRetriever(f"{url}/").retrieve(QUERY)
  assert (found.content, found.source) == ("Ships land in Bergen.", "news")


def test_an_answer_from_a_server_is_that_from_a_folder(server):
  url, local = server
  engine = Engine(tiny("hybrid"))
  remote, near = (
    answer(QUERY, place, engine, top_k=2, max_new_tokens=8) for place in (HttpRetriever(url, "facts"), local)
  )
  assert remote == near


def test_rollouts_on_the_host_search_over_http(server):
  url, local = server

  def rollout(retriever):
    def retrieve(queries, hop):
      texts = [rollouts.TOKENIZER.decode(query, skip_special=True) or QUERY for query in queries]
      found = retriever.retrieve_batch([f"{text} Oslo Bergen ships"[-60:] for text in texts], 1)
      return [[(int(each.id), rollouts.BODIES[int(each.id) % 3]) for each in row] for row in found]

    p = rollouts.policy(RolloutConfig(2, 1, 4, 3), "TM", rollouts.SEARCHY)
    flat = p.replace(params=unstack(p.model, p.params))
    return jax.device_get(rollout_on_host(flat, *rollouts.prompts(), retrieve, rollouts.X, jax.random.key(0)))

  remote, near = rollout(HttpRetriever(url, "facts")), rollout(local)
  np.testing.assert_array_equal(remote.tokens, near.tokens)
  np.testing.assert_array_equal(remote.slots, near.slots)
  assert (remote.slots >= 0).any()


def test_what_the_server_refuses_is_said(server, monkeypatch):
  url, _ = server
  with pytest.raises(ValueError, match="answered 404: there is no knowledge base 'fact'; there are facts"):
    HttpRetriever(url, "fact").retrieve(QUERY)
  with pytest.raises(ValueError, match="answered 400: "):
    HttpRetriever(url, "facts").retrieve(QUERY, where={"yaer": 1})
  monkeypatch.setenv("SELFRAG_API_KEY", "another-key-0123456789")
  with pytest.raises(ValueError, match="answered 401: no API key, or a wrong one"):
    HttpRetriever(url, "facts").retrieve(QUERY)
  with pytest.raises(OSError, match="refused"):
    HttpRetriever("http://127.0.0.1:9", "facts").retrieve(QUERY)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "http://me:secret@host"])
def test_an_address_that_is_none_is_refused(url):
  with pytest.raises(ValueError, match="is no address of a server"):
    HttpRetriever(url)
