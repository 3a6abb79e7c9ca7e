"""The Self-RAG model: one language model embeds texts, stores them in a memory, retrieves them and generates with them.

`SelfRAGModel` joins the pure functions of `generate.augment` to a `MemoryStore` with text. (It does not use the
reflection tokens of arXiv 2310.11511.)
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from selfrag_jax.checked import Checked, Count
from selfrag_jax.encoders.language_model import LMEncoder
from selfrag_jax.generate.augment import Order, Pooling, augment, embed, input_logits, memory_tokens
from selfrag_jax.generate.base import Base
from selfrag_jax.generate.complete import complete
from selfrag_jax.generate.host_rollout import pad_documents
from selfrag_jax.generate.sampling import GREEDY, SamplingConfig
from selfrag_jax.memory.records import Chunk
from selfrag_jax.memory.store import MemoryStore
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.likelihood import token_log_probs
from selfrag_jax.model.lm import LM, unstack
from selfrag_jax.model.pooling import hidden_states
from selfrag_jax.ragged import pad_rows, pad_to_powers, power_of_two
from selfrag_jax.text.rows import check_ordinary, encode, input_rows
from selfrag_jax.typing import Array, ArrayLike, Params

IGNORED = -100  # a label that is not predicted

Inputs = Sequence[str] | Sequence[Sequence[int]]
Metadata = Mapping[str, Any]
Ids = Iterable[str]


@dataclasses.dataclass(frozen=True)
class SelfRAGConfig(Checked):
  """Settings of a model with memory. The first three describe a model from scratch; a base model brings its own."""

  d_model: int = 512
  n_layers: int = 12
  n_heads: int = 8
  max_chunks: Count = 10_000
  chunk_size: Count = 64  # tokens of a chunk
  top_k: Count = 5
  searches: Count = 1  # each further query begins with the best new chunks of those before; together they give `top_k`
  retrieval_method: Literal["cosine", "dot", "learned"] = "cosine"  # learned: a projection of the query, then dot
  embed_pooling: Pooling = "mean"
  order: Order = "score"  # best chunk first; or last (reverse), best at both ends (edges), in reading order (position)
  memory_dropout: float = 0.1  # share of the training sequences that see no memory
  contrastive_weight: float = 0.1

  def __post_init__(self):
    super().__post_init__()
    if self.searches > self.top_k:
      raise ValueError(
        f"searches is {self.searches}, and they share top_k = {self.top_k} chunks: give each at least one"
      )
    if not 0 <= self.memory_dropout <= 1 or self.contrastive_weight < 0:
      raise ValueError(
        f"memory_dropout is {self.memory_dropout}, it must lie in [0, 1]; contrastive_weight is "
        f"{self.contrastive_weight}, it must be at least 0"
      )

  @property
  def metric(self) -> Literal["cosine", "dot"]:
    return "cosine" if self.retrieval_method == "cosine" else "dot"

  @property
  def shares(self) -> tuple[int, ...]:
    """How many chunks each search adds."""
    share, rest = divmod(self.top_k, self.searches)
    return (share + rest, *[share] * (self.searches - 1))


def lm_loss(logits_BxTxV: Array, labels_BxT: Array) -> Array:
  """Return the mean cross-entropy of the labels, each predicted from the position before it; -100 is ignored."""
  targets = labels_BxT[:, 1:]
  counted = targets != IGNORED
  losses = -token_log_probs(logits_BxTxV[:, :-1], jnp.where(counted, targets, 0))
  return jnp.sum(jnp.where(counted, losses, 0)) / jnp.maximum(jnp.sum(counted), 1)


class Output(NamedTuple):
  """Logits [B, T, V] of the input tokens, the loss if labels were given, and the retrieved chunks of each input."""

  logits: Array
  loss: Array | None
  retrieved: list[list[Chunk]]


class Answer(NamedTuple):
  """A generated text, and the chunks that stood before its prompt."""

  text: str
  token_ids: list[int]
  retrieved: list[Chunk]


class SelfRAGModel:
  """A language model with a memory of the texts that it has read. Inputs are texts, or lists of token ids.

  Shapes are padded to powers of two, so a few programs serve all inputs. Assign `params` to change the parameters: this
  empties the embedding cache, but chunks in the memory keep the old embeddings until they are written again.

  With an `encoder`, such as `configs/encoder.py:smollm2_135m` trains, the model's weights embed as that one does, in
  place of `config.embed_pooling`; the memory has its width.
  """

  _CACHED = 100_000  # embeddings
  _BATCH = 256  # inputs embedded at once

  def __init__(self, base_model: Base, memory: MemoryStore, config: SelfRAGConfig, *, encoder: LMEncoder | None = None):
    """Raises ValueError if the model, the memory, the config and the encoder do not fit together."""
    if base_model.tokenizer is None:
      raise ValueError("the base model comes without a tokenizer; load it with load_model(..., tokenizer=...)")
    if encoder is not None:
      _check_encoder(encoder, base_model.config, config)
    settings = memory.settings
    wanted = {
      "d_model": encoder.width if encoder else base_model.config.d_model,
      "max_chunks": config.max_chunks,
      "chunk_size": config.chunk_size,
      "metric": config.metric,
    }
    for name, value in wanted.items():
      if settings[name] != value:
        raise ValueError(f"the memory has {name} = {settings[name]}, this model needs {value}: make another memory")
    if config.retrieval_method == "learned" and not base_model.config.query_projection:
      raise ValueError("retrieval_method 'learned' needs a model with query_projection = True")
    self.model, self.tokenizer = base_model.config, base_model.tokenizer
    self.memory, self.config = memory, config
    self._ids, self._encoder = memory_tokens(self.tokenizer), encoder
    self._cache: OrderedDict[bytes, np.ndarray] = OrderedDict()
    self.params = base_model.params

  @property
  def params(self) -> Params:
    return self._params

  @params.setter
  def params(self, params: Params) -> None:
    self._params, self._flat = params, None
    self._cache.clear()

  def forward_embed_only(self, inputs: Inputs) -> Array:
    """Return the hidden states [B, T, D] of the inputs, without the head; T is the longest length."""
    rows = self._rows(inputs)
    tokens, lengths = pad_to_powers(rows)
    hidden = _hidden_jit(self.model, self.params, tokens, lengths)
    return hidden[: len(rows), : max(map(len, rows))]

  def embed(self, inputs: Inputs, *, queries: bool = False) -> np.ndarray:
    """Embed inputs as f32 [B, D]; inputs that were embedded before with these parameters come from a cache.

    An encoder embeds `queries` otherwise than chunks.
    """
    rows, encoder = self._rows(inputs), self._encoder
    if encoder is None:
      run = partial(_embed_jit, self.model, self.params, ids=self._ids, pooling=self.config.embed_pooling)
    else:
      params = {**encoder.params, "model": self.params}
      run = partial(encoder.apply, encoder.query_params(params) if queries else params)
    keys = [bytes([queries]) + np.asarray(row, np.int32).tobytes() for row in rows]
    new = [(key, row) for key, row in dict(zip(keys, rows, strict=True)).items() if key not in self._cache]
    for start in range(0, len(new), self._BATCH):
      names, values = zip(*new[start : start + self._BATCH], strict=True)
      tokens, lengths = pad_to_powers(values)
      self._cache.update(zip(names, np.asarray(run(tokens, lengths), np.float32), strict=False))
    out = np.stack([self._cache[key] for key in keys])
    while len(self._cache) > self._CACHED:
      self._cache.popitem(last=False)
    return out

  def retrieve(self, query_emb: ArrayLike, top_k: int | None = None) -> list[list[Chunk]]:
    """Return the best chunks of the memory for embedded queries [B, D], best first, with their scores."""
    queries = np.asarray(query_emb)
    if self.config.retrieval_method == "learned":
      queries = np.asarray(_project_jit(self.model, self.params, queries))
    return self.memory.search_batched(queries, self.config.top_k if top_k is None else top_k)

  def augment(self, inputs: Inputs, retrieved: Sequence[Sequence[Chunk]]) -> list[list[int]]:
    """Return `[MEM] c1 [MEM] c2 [SEP] input` for each input, as token ids.

    Raises ValueError for a chunk with ids that no text yields: the model would take them for control tokens.
    """
    tokens, lengths, _ = self._augmented(self._rows(inputs), retrieved)
    return [row[:n].tolist() for row, n in zip(np.asarray(tokens), np.asarray(lengths), strict=False)][: len(retrieved)]

  def forward(self, inputs: Inputs, labels: Sequence[Sequence[int]] | None = None, use_memory: bool = True) -> Output:
    """Embed, retrieve, augment, and return the logits of the input tokens, as if the chunks had stood before them.

    labels: token ids like the inputs, -100 where nothing is to be predicted. Without `use_memory`, or with an empty
    memory, these are the logits of the base model.
    """
    rows = self._rows(inputs)
    retrieved = self._remembered(rows, use_memory)
    time = max(map(len, rows))
    augmented = self._augmented(rows, retrieved)
    logits = _logits_jit(self.model, self.params, *augmented, time=power_of_two(time))[: len(rows), :time]
    if labels is None:
      return Output(logits, None, retrieved)
    if [len(row) for row in labels] != [len(row) for row in rows]:
      raise ValueError("labels must be as long as the inputs, row by row; -100 where nothing is to be predicted")
    targets, _ = pad_rows(labels, time, IGNORED)
    return Output(logits, lm_loss(logits, jnp.asarray(targets)), retrieved)

  def generate(
    self,
    inputs: Inputs,
    max_new_tokens: int = 64,
    *,
    use_memory: bool = True,
    sampling: SamplingConfig = GREEDY,
    stop: Sequence[str] = ("<|end|>",),
    seed: int = 0,
  ) -> list[Answer]:
    """Continue each input, with the chunks retrieved for it in front; greedy unless `sampling` says otherwise.

    stop: names of special tokens that end an answer.
    """
    rows = self._rows(inputs)
    retrieved = self._remembered(rows, use_memory)
    tokens, lengths, _ = self._augmented(rows, retrieved)
    if self._flat is None:
      self._flat = _unstack_jit(self.model, self.params)
    written = _complete_jit(
      self.model,
      self._flat,
      tokens,
      lengths,
      jax.random.key(seed),
      max_new_tokens=max_new_tokens,
      sampling=sampling,
      stop_ids=tuple(self.tokenizer.special[name] for name in stop),
    )
    answers = []
    for row, n, chunks in zip(np.asarray(written.tokens), np.asarray(written.lengths), retrieved, strict=False):
      ids = row[:n].tolist()
      answers.append(Answer(self.tokenizer.decode(ids, skip_special=True), ids, chunks))
    return answers

  def write_to_memory(
    self, text: str | Sequence[str], metadata: Metadata | Sequence[Metadata] | None = None, *, replacing: Ids = ()
  ) -> list[str]:
    """Cut a text, or several, into chunks of at most `chunk_size` tokens, embed and store them; returns their ids.

    `metadata` goes with every chunk, or is a list with one mapping for each text; the chunks with the ids `replacing`
    are deleted in the same change. Raises ValueError for a text that is empty or white space, and changes nothing then.
    """
    texts = [text] if isinstance(text, str) else text
    given = [metadata or {}] * len(texts) if metadata is None or isinstance(metadata, Mapping) else metadata
    if len(given) != len(texts):
      raise ValueError(f"{len(given)} metadata for {len(texts)} texts: give one for each, or one for all")
    chunks, size = [], self.config.chunk_size
    for whole, of_whole in zip(texts, given, strict=True):
      ids = encode(self.tokenizer, whole)
      pieces = [ids[i : i + size] for i in range(0, len(ids), size)]
      parts = [whole] if len(pieces) == 1 else [self.tokenizer.decode(piece) for piece in pieces]
      says = [(part, piece, of_whole) for part, piece in zip(parts, pieces, strict=True) if part.strip()]
      if not says:
        raise ValueError(f"{whole!r} says nothing; there is nothing to remember")
      chunks += says
    if not chunks:
      return self.memory.add_many([], replacing=replacing)
    parts, pieces, each = map(list, zip(*chunks, strict=True))
    return self.memory.add_many(parts, self.embed(pieces), token_ids=pieces, metadata=each, replacing=replacing)

  def explain(self, inputs: Inputs) -> list[list[Chunk]]:
    """Return the chunks that would be retrieved for each input, with `score`, and `metadata` that names the source."""
    return self._remembered(self._rows(inputs), True)

  def _rows(self, inputs: Inputs) -> list[list[int]]:
    return input_rows(self.tokenizer, inputs, self.model.vocab_size)

  def _chunk_ids(self, chunk: Chunk) -> list[int]:
    """Return the token ids of a chunk in the model's input. Raises ValueError for ids that no text yields."""
    size, ids = self.config.chunk_size, chunk.token_ids.tolist()
    if not ids:
      return encode(self.tokenizer, chunk.text)[:size]
    try:
      check_ordinary(self.tokenizer, ids)
    except ValueError as error:
      raise ValueError(f"chunk {chunk.id!r}: {error}; delete it, and write its text with write_to_memory") from None
    if len(ids) > size:
      raise ValueError(f"chunk {chunk.id!r} has {len(ids)} tokens, chunk_size is {size}: give chunks of this memory")
    return ids

  def _remembered(self, rows: list[list[int]], use_memory: bool) -> list[list[Chunk]]:
    """Retrieve chunks for each input in `config.searches` searches; chunks of earlier searches come first."""
    if not use_memory or not self.memory.size:
      return [[] for _ in rows]
    retrieved: list[list[Chunk]] = [[] for _ in rows]
    best: list[list[Chunk]] = [[] for _ in rows]
    for share in self.config.shares:
      asked = self.augment(rows, best) if any(best) else rows
      for chunks, leading, found in zip(retrieved, best, self.retrieve(self.embed(asked, queries=True)), strict=True):
        known = {chunk.id for chunk in chunks}
        new = [chunk for chunk in found if chunk.id not in known][:share]
        chunks += new
        leading += new[:1]
    return retrieved

  def _augmented(self, rows: list[list[int]], retrieved: Sequence[Sequence[Chunk]]) -> tuple[Array, Array, Array]:
    """Put chunks before inputs on the device; return padded tokens, lengths, and where each input starts."""
    if len(retrieved) != len(rows):
      raise ValueError(f"{len(retrieved)} lists of chunks for {len(rows)} inputs: give one for each")
    tokens, lengths = pad_to_powers(rows)
    k = max((len(chunks) for chunks in retrieved), default=0)
    if not k:
      return jnp.asarray(tokens), jnp.asarray(lengths), jnp.zeros_like(jnp.asarray(lengths))
    # rounding k up keeps the shapes few, but a top_k that the memory cannot fill gets no room
    k, size = max(k, min(self.config.top_k, power_of_two(max(k, 16)))), self.config.chunk_size
    if self.config.order == "position":  # in the store, not the slot, which may have been reused
      retrieved = [sorted(chunks, key=lambda chunk: chunk.metadata["position"]) for chunks in retrieved]
    documents = [list(enumerate(map(self._chunk_ids, chunks))) for chunks in retrieved]
    found = pad_documents([*documents, *[()] * (len(tokens) - len(rows))], k, size)
    return _augment_jit(tokens, lengths, found, ids=self._ids, order=self.config.order)


def _check_encoder(encoder: LMEncoder, model: ModelConfig, config: SelfRAGConfig) -> None:
  if encoder.width != 2 * model.d_model:
    raise ValueError(f"the encoder is of a model with d_model = {encoder.config.d_model}, this one has {model.d_model}")
  if encoder.config.vocab_size != model.vocab_size:
    raise ValueError(f"the encoder has {encoder.config.vocab_size} tokens, this model has {model.vocab_size}")
  if not encoder.constants:
    raise ValueError("the encoder is not fitted to any texts; call its fit, or load a trained one")
  if config.retrieval_method == "learned":
    raise ValueError("retrieval_method 'learned' projects the model's own vectors; with an encoder use cosine or dot")


def _project(model: ModelConfig, params: Params, queries_BxD: Array) -> Array:
  return jnp.asarray(LM(model).apply(params, queries_BxD, method="project"))


# compiled once for all models of one shape
_embed_jit = jax.jit(embed, static_argnames=("model", "ids", "pooling"))
_hidden_jit = jax.jit(hidden_states, static_argnames="config")
_augment_jit = jax.jit(augment, static_argnames=("ids", "order"))
_logits_jit = jax.jit(input_logits, static_argnames=("model", "time"))
_project_jit = jax.jit(_project, static_argnames="model")
_unstack_jit = jax.jit(unstack, static_argnames="config")
_complete_jit = jax.jit(complete, static_argnames=("model", "max_new_tokens", "sampling", "stop_ids"))
