"""What the server reads, as OpenAI's protocol has it; fields beyond that protocol are said to be so.

A field that no schema has is an error, so that a misspelled one is not dropped. Fields of OpenAI's that would change
nothing here are taken; those that would change something, which the server does not do, are taken with the value alone
that asks for nothing.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

INT64 = 2**63
MOST_TEXTS, MOST_PROMPTS, MOST_SOURCES, MOST_RESULTS = 2048, 64, 16, 100

Count = Annotated[int, Field(ge=1, le=1 << 20)]
Nothing = Annotated[float, Field(ge=0, le=0)] | None
Stop = Annotated[str, Field(min_length=1, max_length=1000)]
Ids = Annotated[list[Annotated[int, Field(ge=0, le=1 << 30)]], Field(min_length=1)]


class Strict(BaseModel):
  """An object without unknown fields, whose numbers are numbers."""

  model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class TextPart(Strict):
  """A part of a message."""

  type: Literal["text"]
  text: str


class Message(BaseModel):
  """A message of a conversation. What else a client keeps in one, such as a refusal that is null, is dropped."""

  model_config = ConfigDict(extra="ignore", strict=True)

  role: Literal["system", "developer", "user", "assistant"]
  content: str | list[TextPart] | None = None

  @property
  def text(self) -> str:
    """The text of all parts."""
    return "".join(part.text for part in self.content) if isinstance(self.content, list) else self.content or ""


class JSONSchema(Strict):
  """A JSON schema by the name that a client gives it."""

  name: str = ""
  description: str | None = None
  schema_: dict[str, Any] = Field(alias="schema")
  strict: bool | None = None


class TextFormat(Strict):
  """Any text."""

  type: Literal["text"]


class ObjectFormat(Strict):
  """Any JSON object."""

  type: Literal["json_object"]


class SchemaFormat(Strict):
  """JSON that fits a schema."""

  type: Literal["json_schema"]
  json_schema: JSONSchema


class StreamOptions(Strict):
  """What a stream has beside pieces of text."""

  include_usage: bool | None = None
  include_obfuscation: bool | None = None


class Sampling(Strict):
  """The settings that all texts have."""

  model: str
  n: Annotated[int, Field(ge=1, le=128)] | None = None
  temperature: Annotated[float, Field(ge=0, le=2)] | None = None
  top_p: Annotated[float, Field(ge=0, le=1)] | None = None
  stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
  seed: Annotated[int, Field(ge=-INT64, lt=INT64)] | None = None
  max_tokens: Count | None = None
  stream: bool | None = None
  stream_options: StreamOptions | None = None
  response_format: Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None
  # without effect
  user: Any = None
  metadata: Any = None
  store: Any = None
  service_tier: Any = None
  safety_identifier: Any = None
  prompt_cache_key: Any = None
  # taken if they ask for nothing
  frequency_penalty: Nothing = None
  presence_penalty: Nothing = None
  logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = None

  @model_validator(mode="after")
  def _options_need_a_stream(self) -> "Sampling":
    if self.stream_options is not None and not self.stream:
      raise ValueError("stream_options is for streams: give stream=true, or leave it out")
    return self


class ChatRequest(Sampling):
  """A request for the assistant's next message. `knowledge_base`, `memory` and `top_k` are not OpenAI's."""

  messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_TEXTS)]
  max_completion_tokens: Count | None = None
  logprobs: bool | None = None
  knowledge_base: str | None = Field(None, description="answer from the documents of this knowledge base")
  memory: bool | None = Field(None, description="answer from the memory")
  top_k: Annotated[int, Field(ge=1, le=MOST_SOURCES)] = Field(5, description="the most passages to answer from")
  # without effect
  parallel_tool_calls: Any = None
  # taken if they ask for nothing
  top_logprobs: Nothing = None
  tools: Annotated[list[Any], Field(max_length=0)] | None = None
  tool_choice: Literal["none", "auto"] | None = None

  @model_validator(mode="after")
  def _one_place_to_look(self) -> "ChatRequest":
    if self.memory and self.knowledge_base is not None:
      raise ValueError("knowledge_base and memory: give one of the two")
    if self.messages[-1].role == "assistant":
      raise ValueError("the last message is the assistant's; there must be one to answer after it")
    return self


class CompletionRequest(Sampling):
  """A request to continue texts, or lists of token ids."""

  prompt: (
    str
    | Annotated[list[str], Field(min_length=1, max_length=MOST_PROMPTS)]
    | Ids
    | Annotated[list[Ids], Field(min_length=1, max_length=MOST_PROMPTS)]
  )
  logprobs: Annotated[int, Field(ge=0, le=0, description="0: the log-probabilities of the tokens")] | None = None
  # taken if they ask for nothing
  echo: Literal[False] | None = None
  suffix: Literal[""] | None = None
  best_of: Literal[1] | None = None


class EmbeddingRequest(Strict):
  """A request for the vectors of texts."""

  model: str
  input: str | Annotated[list[str], Field(min_length=1, max_length=MOST_TEXTS)]
  encoding_format: Literal["float", "base64"] = "float"
  dimensions: Count | None = None
  user: Any = None


class SearchRequest(Strict):
  """A search of a knowledge base or of the memory. `where` is a filter on metadata, id, title and source."""

  query: str
  knowledge_base: str | None = None
  memory: bool | None = None
  top_k: Annotated[int, Field(ge=1, le=MOST_RESULTS)] = 5
  where: dict[str, Any] | None = None

  @model_validator(mode="after")
  def _one_place_to_look(self) -> "SearchRequest":
    if bool(self.memory) == (self.knowledge_base is not None):
      raise ValueError("give knowledge_base, or memory=true, one of the two")
    return self


class NewMemory(Strict):
  """A text to remember. It takes the place of the text with the same `key`."""

  text: Annotated[str, Field(min_length=1, max_length=100_000)]
  source: Annotated[str, Field(max_length=2000)] = ""
  key: Annotated[str, Field(min_length=1, max_length=2000)] | None = None


class ChangedMemory(Strict):
  """The new text of a memory."""

  text: Annotated[str, Field(min_length=1, max_length=100_000)]
