"""A chat model: it answers in order, whatever the batch, and keeps its limits as an engine."""

import dataclasses

import pytest

import selfrag_jax.textgrad as tg
from selfrag_jax.experiments import chat_model as chat
from selfrag_jax.experiments.chat_model import ChatModel, LocalEngine
from selfrag_jax.text.tokenizer import ByteTokenizer
from selfrag_jax.train.load import LoadedModel


def test_answers_do_not_depend_on_the_batch(chatting_model):
  model = ChatModel(chatting_model, "tiny")
  talks = [[{"role": "user", "content": text}] for text in ("a longer question than the others", "hi", "why?")]
  together = model.answer(talks, max_new_tokens=8, batch_size=2)
  assert together == [model.answer([talk], max_new_tokens=8)[0] for talk in talks]
  assert len({answer.text for answer in together}) > 1
  assert together[0].prompt_tokens > together[1].prompt_tokens
  assert all(0 < answer.tokens <= 8 for answer in together)


def test_models_that_do_not_chat_are_refused(chatting_model):
  with pytest.raises(ValueError, match="tiny does not chat"):
    ChatModel(LoadedModel(chatting_model.config, chatting_model.params, {}, ByteTokenizer()), "tiny")


def test_as_an_engine(chatting_model, monkeypatch):
  monkeypatch.setattr(chat, "load_model", lambda source, phase=None, mesh=None: chatting_model)
  account = tg.Account()
  engine = LocalEngine("tiny", account=account, temperature=0.0, max_tokens=6, context_tokens=400, concurrency=8)
  assert engine.concurrency == 1
  assert engine("hi", system_prompt="be kind") == engine("hi", system_prompt="be kind") != engine("hi")
  assert (account.calls, 0 < account.completion_tokens <= 18) == (3, True)
  prompt = tg.Variable("be kind", role_description="prompt")
  answer = tg.BlackboxLLM(engine, prompt)(tg.Variable("hi", requires_grad=False, role_description="case"))
  assert answer.value == engine("hi", system_prompt="be kind")
  with pytest.raises(tg.ContextBudgetError):
    engine("x" * 400)
  with pytest.raises(tg.EngineError, match="no images"):
    engine(["what is it?", b"\x89PNG"])


def test_engines_share_a_model_and_keep_to_its_context(chatting_model, monkeypatch):
  loads = []
  shorter = dataclasses.replace(chatting_model, context_tokens=300)
  monkeypatch.setattr(chat, "load_model", lambda source, phase=None, mesh=None: loads.append(source) or shorter)
  engines = [LocalEngine("short", **limit) for limit in ({}, {"context_tokens": 400}, {"context_tokens": 200})]
  assert [engine.context_tokens for engine in engines] == [300, 300, 200]
  assert loads == ["short"]
