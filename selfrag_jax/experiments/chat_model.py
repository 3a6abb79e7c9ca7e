"""A chat model that answers conversations in batches, and the engine that offers it to textual gradients."""

import dataclasses
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

import selfrag_jax.textgrad as tg
from selfrag_jax.generate.complete import complete
from selfrag_jax.generate.sampling import GREEDY, SamplingConfig
from selfrag_jax.mesh import fetch
from selfrag_jax.model.lm import unstack
from selfrag_jax.ragged import pad_rows, round_up
from selfrag_jax.text.chat import ChatTemplate, find_template, render_for_completion
from selfrag_jax.text.rag_prompts import RenderedConversation, render_rag_conversation_for_tokenizer
from selfrag_jax.text.tokenizer import Tokenizer
from selfrag_jax.textgrad.limits import Completion, Content, EngineError
from selfrag_jax.train.load import LoadedModel, load_model

BUCKET = 256  # prompts are padded to a multiple of it, so that a few compiled programs serve all lengths
_complete = jax.jit(complete, static_argnames=("model", "max_new_tokens", "sampling", "stop_ids"))


class Answer(NamedTuple):
  """The text of an answer, and the numbers of tokens of its prompt and of the answer.

  `dropped_documents` counts those that did not fit into the model's context.
  """

  text: str
  prompt_tokens: int
  tokens: int
  dropped_documents: int = 0


class ChatModel:
  """A model that chats in a template."""

  def __init__(self, loaded: LoadedModel, name: str, template: ChatTemplate | None = None, bucket: int = BUCKET):
    """Wrap a loaded model and its template (None: by its tokenizer); prompts are padded to a multiple of `bucket`.

    Raises ValueError if no template fits the tokenizer.
    """
    if loaded.tokenizer is None or (chosen := template or find_template(loaded.tokenizer)) is None:
      raise ValueError(f"{name} does not chat: its tokenizer lacks the special tokens of ChatML and of Llama 3")
    self._template, self._bucket, self._stop = chosen, bucket, loaded.tokenizer.special[chosen.end_of_turn.name]
    self.tokenizer, self._config, self.context_tokens = loaded.tokenizer, loaded.config, loaded.context_tokens
    self._params = jax.jit(unstack, static_argnums=0)(loaded.config, loaded.params)

  def count(self, conversation: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of tokens of a prompt."""
    return len(self._prompt(conversation))

  def _prompt(self, conversation: Sequence[Mapping[str, Any]]) -> list[int]:
    return render_for_completion(self.tokenizer, {"messages": list(conversation)}, self._template)

  def answer(
    self,
    conversations: Sequence[Sequence[Mapping[str, Any]]],
    *,
    max_new_tokens: int,
    sampling: SamplingConfig = GREEDY,
    seed: int = 0,
    batch_size: int = 1,
  ) -> list[Answer]:
    """Answer conversations (lists of turns with `role` and `content`), `batch_size` at once, in their order.

    Messages of retrieved documents that do not fit into the model's context beside the answer lose documents, the last
    first. Raises ValueError for a conversation that has some and does not fit without any.
    """
    room = None if self.context_tokens is None else self.context_tokens - max_new_tokens
    fitted = [fit_prompt(self.tokenizer, turns, self._template, room) for turns in conversations]
    prompts = [one.ids for one in fitted]
    by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    answers: dict[int, Answer] = {}
    for start in range(0, len(by_length), batch_size):
      part = by_length[start : start + batch_size]
      width = round_up(len(prompts[part[-1]]), self._bucket)
      tokens, lengths = pad_rows([prompts[i] for i in part] + [[]] * (batch_size - len(part)), width)
      written = fetch(
        _complete(
          self._config,
          self._params,
          tokens,
          lengths,
          jax.random.fold_in(jax.random.key(seed), start),
          max_new_tokens=max_new_tokens,
          sampling=sampling,
          stop_ids=(self._stop,),
        )
      )
      for i, row, n in zip(part, written.tokens, written.lengths, strict=False):
        said = self.tokenizer.decode(row[:n], skip_special=True)
        answers[i] = Answer(said, len(prompts[i]), int(n), fitted[i].dropped_documents)
    return [answers[i] for i in range(len(prompts))]


def fit_prompt(
  tokenizer: Tokenizer, turns: Sequence[Mapping[str, Any]], template: ChatTemplate, room: int | None
) -> RenderedConversation:
  """Render the prompt of the next turn in at most `room` tokens, if it has documents that can be left out.

  Raises ValueError if they are not enough.
  """
  limit = room if any(turn.get("documents") for turn in turns) else None
  return render_rag_conversation_for_tokenizer(
    tokenizer, {"messages": list(turns)}, template, limit, for_completion=True
  )


_loaded: weakref.WeakValueDictionary[str, ChatModel] = weakref.WeakValueDictionary()


def load_chat(source: str) -> ChatModel:
  """Load a chat model from a source of `load_model`; callers that hold it at the same time share one copy."""
  if (model := _loaded.get(source)) is None:
    _loaded[source] = model = ChatModel(load_with_tokenizer(source), source)
  return model


def load_with_tokenizer(source: str, mesh: Mesh | None = None, phase: str | None = None) -> LoadedModel:
  """Load a model with its tokenizer: a run, whose checkpoint has the name of it alone, gets the one that it began with.

  Raises like `load_model`, and ValueError for a run that did not begin with a pretrained model.
  """
  loaded = load_model(source, phase, mesh=mesh)
  init = loaded.metadata.get("config", {}).get("init")
  if loaded.tokenizer is not None:
    return loaded
  if not init:
    raise ValueError(
      f"{source} holds no tokenizer: put its tokenizer.json beside the weights; a run has one if it began with a "
      "pretrained model"
    )
  begun = load_with_tokenizer(init, mesh)
  if begun.tokenizer is None or begun.tokenizer.fingerprint != loaded.metadata["tokenizer"]["fingerprint"]:
    raise ValueError(f"{source} was trained with a tokenizer that {init} no longer has")
  return dataclasses.replace(loaded, tokenizer=begun.tokenizer, context_tokens=begun.context_tokens)


class LocalEngine(tg.MeteredEngine):
  """An engine that runs a chat model on this machine's devices, one call at a time.

  The context is limited by `context_tokens` or by the model's own context, whichever is smaller.
  """

  def __init__(self, source: str, *, seed: int = 0, **options: Any):
    """Load a source of `load_model`. `options` are those of `MeteredEngine`, with temperature and max_tokens."""
    self._chat, self._seed = load_chat(source), seed
    limits = [limit for limit in (options.get("context_tokens"), self._chat.context_tokens) if limit is not None]
    own = {"context_tokens": min(limits, default=None), "concurrency": 1}
    super().__init__(source, count_tokens=self._count, **{**options, **own})

  def complete(self, content: Content, system_prompt: str | None, **sampling: Any) -> Completion:
    """Answer a prompt. Raises EngineError for images."""
    if not isinstance(content, str):
      raise EngineError(f"{self.model_string} reads no images")
    turns = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    (answer,) = self._chat.answer(
      [[*turns, {"role": "user", "content": content}]],
      max_new_tokens=sampling.get("max_tokens", 256),
      sampling=SamplingConfig(sampling.get("temperature", 0.0)),
      seed=self._seed,
    )
    return Completion(answer.text, answer.prompt_tokens, answer.tokens)

  def _count(self, content: Content | None) -> int:
    return len(self._chat.tokenizer.encode(content)) + 8 if isinstance(content, str) else 0  # 8: ChatML's own
