"""Engines by name and by option: mistakes are errors at construction, and LiteLLM gets the names that it knows."""

import inspect
import sys
import traceback
import types

import pytest

import selfrag_jax.textgrad as tg
from selfrag_jax.textgrad.names import ALIASES
from selfrag_jax.textgrad.options import SAMPLING


@pytest.fixture(autouse=True)
def _environment(monkeypatch, tmp_path):
  monkeypatch.setenv("OPENAI_API_KEY", "k")
  monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))


@pytest.fixture
def litellm(monkeypatch):
  """A module in LiteLLM's place; `calls` are what it was asked, `answer` what it answers."""
  module = types.ModuleType("litellm")
  module.calls, module.answer = [], {"choices": [{"message": {"content": "seven"}}]}

  def completion(**asked):
    module.calls.append(asked)
    if isinstance(module.answer, Exception):
      raise module.answer
    return module.answer

  module.completion = completion
  monkeypatch.setitem(sys.modules, "litellm", module)
  return module


@pytest.mark.parametrize(
  ("name", "meant"),
  [
    ("gtp-4o", "'gpt-4o'"),
    ("GPT-4o", "'gpt-4o'"),
    (" gpt-4o", "'gpt-4o'"),
    ("olama-qwen3", "'ollama-qwen3'"),
    ("cluade-3-opus", "'claude-3-opus'"),
    ("experimantal:gpt-9", "'experimental:gpt-9'"),
    ("haikoo", "'haiku'"),
    ("gork-llama3", None),
  ],
)
def test_unknown_names_are_refused_with_what_may_be_meant(name, meant):
  for make in (tg.get_engine, tg.BlackboxLLM, tg.set_backward_engine, lambda n: tg.TextLoss("judge", n)):
    with pytest.raises(ValueError, match=f"unknown engine {name!r}.*OpenAIEngine") as caught:
      make(name)
    assert ("did you mean" in str(caught.value)) == (meant is not None)
    assert meant is None or f"did you mean {meant}?" in str(caught.value)


@pytest.mark.parametrize("name", [None, 3, b"gpt-4o", ["gpt-4o"]])
def test_names_are_texts(name):
  with pytest.raises(TypeError, match="name of the engine must be text"):
    tg.get_engine(name)


def test_names_of_textgrad(litellm):
  assert {name: tg.get_engine(name).model_string for name in ("opus", "haiku", "sonnet", "sonnet-3.5")} == {
    name: ALIASES[name] for name in ("opus", "haiku", "sonnet", "sonnet-3.5")
  }
  through = {name: tg.get_engine(name) for name in ("together-llama-3-70b", "groq-x", "azure-x", "command-r")}
  assert {name: engine.model_string for name, engine in through.items()} == {
    "together-llama-3-70b": "together_ai/meta-llama/Llama-3-70b-chat-hf",
    "groq-x": "groq/x",
    "azure-x": "azure/x",
    "command-r": "cohere/command-r",
  }
  assert all(isinstance(engine, tg.LiteLLMEngine) for engine in through.values())
  with pytest.raises(ValueError, match="vllm serve meta-llama/Meta-Llama-3-8B-Instruct"):
    tg.get_engine("vllm-llama-3-8b")


def test_litellm_is_asked_and_remembers(litellm, tmp_path):
  litellm.answer["usage"] = {"prompt_tokens": 5, "completion_tokens": 2}
  account = tg.Account()
  engine = tg.get_engine("experimental:anthropic/claude", cache=True, account=account, top_p=0.9, timeout=3)
  for _ in range(2):
    assert engine.generate(content="3 + 4?", system_prompt="be brief") == "seven"
  (asked,) = litellm.calls
  assert asked["model"] == "anthropic/claude"
  assert asked["messages"] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "3 + 4?"}]
  assert (asked["temperature"], asked["max_tokens"], asked["top_p"], asked["timeout"]) == (0.0, 2000, 0.9, 3)
  assert (account.calls, account.cached_calls, account.tokens) == (1, 1, 7)
  assert (tmp_path / "caches" / "selfrag_jax" / "answers.sqlite").exists()
  engine(["what is it?", b"\x89PNG"])
  assert litellm.calls[1]["messages"][0]["content"][1]["image_url"]["url"].startswith("data:image/png;base64,")


@pytest.mark.parametrize(
  ("answer", "message"),
  [
    (RuntimeError("no such provider"), "RuntimeError: no such provider"),
    ({"choices": []}, "no chat completion"),
    (None, "no chat completion"),
    ({"choices": [{"message": {"content": None}}]}, "answered nothing"),
    ({"choices": [{"message": {"content": ["parts"]}}]}, "answered list"),
  ],
)
def test_useless_answers_of_litellm_are_errors_of_engines(litellm, answer, message):
  litellm.answer = answer
  with pytest.raises(tg.EngineError, match=message):
    tg.get_engine("experimental:x/y")("hi")


def test_without_litellm_the_error_names_the_extra(monkeypatch):
  monkeypatch.setitem(sys.modules, "litellm", None)
  for make in (tg.get_engine, tg.set_backward_engine):
    with pytest.raises(ImportError, match=r"LiteLLM.*pip install 'selfrag_jax\[litellm\]'"):
      make("experimental:gpt-4o", cache=False)
  with pytest.raises(ValueError, match="no model"):
    tg.get_engine("experimental:")


def test_options_of_the_backward_engine(litellm, monkeypatch):
  monkeypatch.setattr(tg.SingletonBackwardEngine, "_engine", None)
  tg.set_backward_engine("experimental:gpt-4o", cache=False)
  engine = tg.SingletonBackwardEngine().get_engine()
  assert (type(engine), engine.cache) == (tg.LiteLLMEngine, None)
  with pytest.raises(TypeError, match="cache go with the name"):
    tg.set_backward_engine(engine, override=True, cache=True)


@pytest.mark.parametrize(
  ("name", "meant"),
  [
    ("tempreture", "temperature"),
    ("max_token", "max_tokens"),
    ("basee_url", "base_url"),
    ("cach", "cache"),
    ("zzz", None),
  ],
)
def test_unknown_options_are_refused_when_an_engine_is_made(litellm, name, meant):
  makers = (
    lambda **o: tg.OpenAIEngine("gpt-4o", **o),
    lambda **o: tg.get_engine("gpt-4o", **o),
    lambda **o: tg.LiteLLMEngine("gpt-4o", **o),
    lambda **o: tg.CallableEngine(["x"], **o),
  )
  for make in makers:
    with pytest.raises(
      ValueError, match=f"unknown option '{name}' of .*Engine.*its options are .*cache.*temperature"
    ) as caught:
      make(**{name: 1})
    if meant in ("temperature", "max_tokens", "cache"):
      assert f"did you mean '{meant}'?" in str(caught.value)


def test_sampling_parameters_are_options_that_the_client_takes():
  from openai.resources.chat.completions import Completions

  assert set(inspect.signature(Completions.create).parameters) >= SAMPLING
  engine = tg.OpenAIEngine("gpt-4o", top_p=0.5, seed=3, stop=["x"], extra_body={"top_k": 5}, reasoning_effort="low")
  assert engine.sampling["extra_body"] == {"top_k": 5}


def test_caches_are_files_and_folders(tmp_path):
  file, folder = tmp_path / "new" / "a.sqlite", tmp_path / "folder"
  folder.mkdir()
  for cache, path in (
    (True, tmp_path / "caches" / "selfrag_jax" / "answers.sqlite"),
    (str(file), file),
    (file, file),
    (folder, folder / "answers.sqlite"),
    (f"{tmp_path}/other/", tmp_path / "other" / "answers.sqlite"),
  ):
    engine = tg.CallableEngine(["once"], cache=cache)
    assert [engine("hi"), engine("hi")] == ["once", "once"]
    assert path.is_file()
  for cache in (None, False):
    assert tg.OpenAIEngine("gpt-4o", cache=cache).cache is None


@pytest.mark.parametrize("cache", [3, [1], {}.keys(), object(), 1.5])
def test_what_is_no_cache_is_refused_when_an_engine_is_made(cache):
  with pytest.raises(ValueError, match=f"cache is a file or folder.*{type(cache).__name__}"):
    tg.OpenAIEngine("gpt-4o", cache=cache)


def test_a_client_of_the_callers_is_asked():
  message = types.SimpleNamespace(content="hello")
  answer = types.SimpleNamespace(choices=[types.SimpleNamespace(message=message)], usage=None)
  asked = []
  completions = types.SimpleNamespace(create=lambda **options: asked.append(options) or answer)
  chat = types.SimpleNamespace(completions=completions)
  client = types.SimpleNamespace(base_url="http://localhost:1234/v1", api_key="lm-studio", chat=chat)
  assert tg.ChatExternalClient(client=client, model_string="local")("hi") == "hello"
  assert asked[0]["model"] == "local"


@pytest.mark.parametrize("name", ["ollama-", "openai/"])
def test_an_engine_has_a_model(name):
  with pytest.raises(ValueError, match="no model"):
    tg.get_engine(name, api_key="k")
  with pytest.raises(TypeError, match="name of the model must be text"):
    tg.OpenAIEngine(None, "http://localhost:1/v1")


def test_a_key_that_a_provider_of_litellm_echoes_is_in_no_error(litellm, monkeypatch):
  monkeypatch.setenv("SOME_API_KEY", "very-secret-0123456789")

  def refuse(**options):
    raise RuntimeError("401: bad key very-secret-0123456789")

  monkeypatch.setattr(sys.modules["litellm"], "completion", refuse)
  with pytest.raises(tg.EngineError, match=r"401: bad key \[key\]") as caught:
    tg.get_engine("experimental:some/model")("x")
  assert "secret" not in "".join(traceback.format_exception(caught.value))


def test_counts_of_litellm_that_are_none_are_counted_here(litellm, monkeypatch):
  account = tg.Account()
  for told in (-5, 1.5, "many", True, 0, 10**30):
    answer = {"choices": [{"message": {"content": "yes"}}], "usage": {"prompt_tokens": told, "completion_tokens": told}}
    monkeypatch.setattr(sys.modules["litellm"], "completion", lambda answer=answer, **options: answer)
    tg.get_engine("experimental:some/model", account=account)("four")
  assert (account.prompt_tokens, account.completion_tokens) == (12, 6)
