"""Texts as OpenAI's chat completions and completions have them, whole or in chunks."""

import abc
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

from selfrag_jax.apps.serve.texts import Delta, Texts
from selfrag_jax.text.tokenizer import Tokenizer

LEAST = -9999.0  # of a log-probability: JSON has no infinity


class Reply(abc.ABC):
  """One reply. A subclass says how a text and its parts are written."""

  prefix = object = chunk_object = ""

  def __init__(self, model: str, tokenizer: Tokenizer, *, logprobs: bool, count: int):
    """count: how many texts."""
    self._id, self._created, self._model = f"{self.prefix}-{secrets.token_hex(12)}", int(time.time()), model
    self._tokenizer, self._logprobs, self._count = tokenizer, logprobs, count
    self._control = {*tokenizer.special.values()}

  @abc.abstractmethod
  def _part(self, delta: Delta, scores: Any, reason: str | None) -> dict[str, Any]:
    """Return a choice of a chunk."""

  @abc.abstractmethod
  def _whole(self, text: str) -> dict[str, Any]:
    """Return what a choice has beside its index and the reason of its end."""

  @abc.abstractmethod
  def _scores(self, deltas: list[Delta]) -> Any:
    """Return the log-probabilities of the tokens of deltas."""

  def _head(self, object: str) -> dict[str, Any]:
    return {"id": self._id, "object": object, "created": self._created, "model": self._model}

  def _is_scored(self, delta: Delta) -> bool:
    return delta.token is not None and delta.token not in self._control

  async def chunks(self, texts: Texts, *, with_usage: bool) -> AsyncIterator[dict[str, Any]]:
    """Yield the chunks of a stream; the last chunk of a text has its sources."""
    head = {**self._head(self.chunk_object), **({"usage": None} if with_usage else {})}
    for index in range(self._count):
      for choice in self._opening(index):
        yield {**head, "choices": [choice]}
    async for delta in texts.deltas():
      scores = self._scores([delta]) if self._logprobs and self._is_scored(delta) else None
      if delta.text or scores:
        yield {**head, "choices": [self._part(delta, scores, None)]}
      if delta.finish_reason is not None:
        sources = {} if delta.sources is None else {"sources": delta.sources}
        yield {**head, "choices": [self._part(Delta(delta.index), None, delta.finish_reason)], **sources}
    if with_usage:
      yield {**head, "choices": [], "usage": usage(texts)}

  def _opening(self, index: int) -> list[dict[str, Any]]:
    return []

  async def whole(self, texts: Texts) -> dict[str, Any]:
    """Return the reply when all texts are finished."""
    rows: list[list[Delta]] = [[] for _ in range(self._count)]
    async for delta in texts.deltas():
      rows[delta.index].append(delta)
    choices, more = [], {}
    for index, deltas in enumerate(rows):
      scores = self._scores([*filter(self._is_scored, deltas)]) if self._logprobs else None
      choice = {"index": index, **self._whole("".join(delta.text for delta in deltas)), "logprobs": scores}
      choices.append({**choice, "finish_reason": deltas[-1].finish_reason})
      more = more if deltas[-1].sources is None else {"sources": deltas[-1].sources}
    return {**self._head(self.object), "choices": choices, "usage": usage(texts), **more}


class ChatReply(Reply):
  """A reply of `/v1/chat/completions`."""

  prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

  def _opening(self, index: int) -> list[dict[str, Any]]:
    delta = {"role": "assistant", "content": ""}
    return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]

  def _part(self, delta: Delta, scores: Any, reason: str | None) -> dict[str, Any]:
    content = {} if reason else {"content": delta.text}
    return {"index": delta.index, "delta": content, "logprobs": scores, "finish_reason": reason}

  def _whole(self, text: str) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": text, "refusal": None}}

  def _scores(self, deltas: list[Delta]) -> Any:
    return {"content": [self._score(delta) for delta in deltas], "refusal": None}

  def _score(self, delta: Delta) -> dict[str, Any]:
    text = self._tokenizer.decode([delta.token or 0])
    spelled = None if "\ufffd" in text else [*text.encode()]  # a token may be a part of a character
    return {"token": text, "bytes": spelled, "logprob": max(delta.log_prob, LEAST), "top_logprobs": []}


class CompletionReply(Reply):
  """A reply of `/v1/completions`."""

  prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

  def __init__(self, *args: Any, **options: Any):
    super().__init__(*args, **options)
    self._offsets = [0] * self._count  # characters of each text so far

  def _part(self, delta: Delta, scores: Any, reason: str | None) -> dict[str, Any]:
    return {"index": delta.index, "text": delta.text, "logprobs": scores, "finish_reason": reason}

  def _whole(self, text: str) -> dict[str, Any]:
    return {"text": text}

  def _scores(self, deltas: list[Delta]) -> Any:
    scores: dict[str, Any] = {"tokens": [], "token_logprobs": [], "text_offset": [], "top_logprobs": None}
    for delta in deltas:
      scores["tokens"].append(self._tokenizer.decode([delta.token or 0]))
      scores["token_logprobs"].append(max(delta.log_prob, LEAST))
      scores["text_offset"].append(self._offsets[delta.index])
      self._offsets[delta.index] += len(delta.text)
    return scores


def usage(texts: Texts) -> dict[str, Any]:
  """Return how many tokens a request had."""
  prompt, reused, written = texts.usage
  return {
    "prompt_tokens": prompt,
    "completion_tokens": written,
    "total_tokens": prompt + written,
    "prompt_tokens_details": {"cached_tokens": reused},
  }
