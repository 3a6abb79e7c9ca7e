"""The replies of the server, as its OpenAPI document describes them; `null` stands for what a reply does not have."""

from typing import Any, Literal

from pydantic import BaseModel


class ErrorDetail(BaseModel):
  """What was wrong, and what would do."""

  message: str
  type: str
  param: str | None
  code: str | None


class ErrorReply(BaseModel):
  """The body of every answer with a status of 400 or more."""

  error: ErrorDetail


class CachedTokens(BaseModel):
  """Tokens of a prompt that had been read before."""

  cached_tokens: int


class Usage(BaseModel):
  """How many tokens a request had."""

  prompt_tokens: int
  completion_tokens: int
  total_tokens: int
  prompt_tokens_details: CachedTokens


class Source(BaseModel):
  """A passage that was shown to the model, with its number in citations; not OpenAI's."""

  number: int
  id: str
  title: str
  text: str
  source: str
  score: float | None
  is_cited: bool
  is_cut: bool
  metadata: dict[str, Any]


class TokenScore(BaseModel):
  """A token that was written, its UTF-8 bytes unless it is a part of a character, and its log-probability."""

  token: str
  bytes: list[int] | None
  logprob: float
  top_logprobs: list[Any]


class ChatScores(BaseModel):
  """The log-probabilities of a message."""

  content: list[TokenScore]
  refusal: None


class AssistantMessage(BaseModel):
  """The assistant's message."""

  role: Literal["assistant"]
  content: str
  refusal: None


class ChatChoice(BaseModel):
  """One of the `n` messages."""

  index: int
  message: AssistantMessage
  logprobs: ChatScores | None
  finish_reason: Literal["stop", "length"]


class ChatCompletion(BaseModel):
  """A reply of `/v1/chat/completions`; `sources` if it was asked for some."""

  id: str
  object: Literal["chat.completion"]
  created: int
  model: str
  choices: list[ChatChoice]
  usage: Usage
  sources: list[Source] = []


class TextScores(BaseModel):
  """The log-probabilities of a continuation."""

  tokens: list[str]
  token_logprobs: list[float]
  text_offset: list[int]
  top_logprobs: None


class TextChoice(BaseModel):
  """One of the continuations: those of the first prompt come first."""

  index: int
  text: str
  logprobs: TextScores | None
  finish_reason: Literal["stop", "length"]


class TextCompletion(BaseModel):
  """A reply of `/v1/completions`."""

  id: str
  object: Literal["text_completion"]
  created: int
  model: str
  choices: list[TextChoice]
  usage: Usage


class Embedding(BaseModel):
  """The vector of a text: numbers, or base64 of little-endian float32."""

  object: Literal["embedding"]
  index: int
  embedding: list[float] | str


class EmbeddingUsage(BaseModel):
  """How many tokens, or words, were embedded."""

  prompt_tokens: int
  total_tokens: int


class Embeddings(BaseModel):
  """A reply of `/v1/embeddings`."""

  object: Literal["list"]
  data: list[Embedding]
  model: str
  usage: EmbeddingUsage


class Model(BaseModel):
  """A model; `kind` is not OpenAI's."""

  id: str
  object: Literal["model"]
  created: int
  owned_by: str
  kind: Literal["chat", "embeddings"]


class Models(BaseModel):
  """All models."""

  object: Literal["list"]
  data: list[Model]


class KnowledgeBase(BaseModel):
  """A knowledge base, and how many documents it has."""

  id: str
  object: Literal["knowledge_base"]
  documents: int


class KnowledgeBases(BaseModel):
  """All knowledge bases."""

  object: Literal["list"]
  data: list[KnowledgeBase]


class Passage(BaseModel):
  """A document of a knowledge base, or a text of the memory; the score is that of the search that found it."""

  id: str
  title: str
  text: str
  source: str
  score: float | None
  metadata: dict[str, Any]
  key: str | None = None


class Passages(BaseModel):
  """What a search has found, best first."""

  object: Literal["list"]
  data: list[Passage]


class MemoryPage(Passages):
  """Some texts of the memory, and how many there are."""

  total: int


class Forgotten(BaseModel):
  """The id of a text that is no longer there."""

  id: str
  object: Literal["memory"]
  deleted: Literal[True]


class Health(BaseModel):
  """The process answers."""

  status: Literal["ok"]


class Ready(BaseModel):
  """The engine works: how many texts it writes, and how many wait."""

  status: Literal["ready"]
  active: int
  waiting: int
