"""Rollouts of a search task with their scores, for reinforcement learning and for evaluation."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from selfrag_jax.checked import Checked, Count, Share
from selfrag_jax.encoders.base import TokenEncoder
from selfrag_jax.encoders.hybrid import HybridLMEncoder
from selfrag_jax.encoders.language_model import LMEncoder
from selfrag_jax.encoders.token_bag import TokenBagEncoder
from selfrag_jax.generate.control import ControlTokens, control_tokens
from selfrag_jax.generate.host_rollout import HostRetrieve, rollout_on_host
from selfrag_jax.generate.retrieve import RetrieverKind, make_retrieve
from selfrag_jax.generate.rollout import Policy, Queries, Rollout, RolloutConfig, rollout
from selfrag_jax.generate.sampling import SamplingConfig
from selfrag_jax.generate.transcript import Transcript, read_transcripts
from selfrag_jax.memory.state import MemoryState, init_memory, write
from selfrag_jax.memory.topk import search
from selfrag_jax.mesh import (
  abstract,
  batch_sharding,
  batch_shards,
  fetch,
  gathered,
  own_part,
  own_rows,
  replicated,
  spread,
)
from selfrag_jax.metrics.answers import exact_match, hotpot_f1
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.lm import for_decoding, unstack
from selfrag_jax.model.vocabulary import whole
from selfrag_jax.ragged import power_of_two
from selfrag_jax.tasks.search_task import Corpus, Indices, SearchBatch, SearchTask, taken
from selfrag_jax.train.data import batches
from selfrag_jax.train.state import param_shardings
from selfrag_jax.typing import Array, ArrayLike, Params, PRNGKey

EMBED_TOKENS = 1 << 15  # tokens of the keys that are embedded at once, padding included
SHORT = 64  # tokens to which shorter keys of a collection are padded, if it has any longer ones
SAMPLE = 64  # questions of the training to which a language model is fitted


@dataclasses.dataclass(frozen=True)
class MemoryConfig(Checked):
  """The memory inside a rollout: how documents are embedded, stored and searched."""

  d_embed: Count = 128  # of the token bag, and of the words beside a language model, which has a width of its own
  encoder: Literal["token_bag", "lm"] = "token_bag"
  dtype: Literal["float32", "bfloat16", "int8"] = "float32"
  method: Literal["exact", "approx"] = "exact"
  words: Share = 0.0  # of the score: the words that query and document share, beside a language model's vectors
  fit_scale: bool = False  # and weights, of a language model that brings its constants: to the documents searched


class Scores(NamedTuple):
  """Scores of each rollout, float32 [B]: of its answer, its documents and its behaviour."""

  exact_match: np.ndarray
  f1: np.ndarray
  first_gold: np.ndarray  # the first search found the first gold document
  gold_recall: np.ndarray  # share of the gold documents that were found
  all_gold: np.ndarray
  searches: np.ndarray
  valid: np.ndarray

  def means(self) -> dict[str, float]:
    """Average each score."""
    return {name: float(values.mean()) for name, values in zip(self._fields, self, strict=True)}


class Episodes(NamedTuple):
  """Rollouts of a batch of questions, `repeats` neighbouring rows each: on device, on the host, and as transcripts.

  With several processes each has its own questions' rollouts on the host, and reads and scores these alone.
  """

  rollout: Rollout
  host: Rollout
  transcripts: list[Transcript]
  batch: SearchBatch
  repeats: int


class RolloutRunner:
  """Runs a policy over the questions of a task; holds the encoder and the memory of a shared corpus.

  The encoder is a bag of tokens, or the language model with `encoder_params`, which stay fixed while the policy learns.
  Unless it brings its constants, it is fitted to passages and questions of the training.

  Compiles once for each (number of rows, rollout bounds, retriever).
  """

  def __init__(
    self,
    task: SearchTask,
    model: ModelConfig,
    memory: MemoryConfig,
    mesh: Mesh,
    encoder_params: Params | None = None,
    constants: Mapping[str, np.ndarray] | None = None,
  ):
    if memory.fit_scale and not constants:
      raise ValueError("memory.fit_scale is for encoder = lm and an encoder as init: all others are fitted anyway")
    if memory.words and memory.encoder != "lm":
      raise ValueError("memory.words counts words beside a language model: set memory.encoder = lm")
    if memory.words and constants and not memory.fit_scale:
      raise ValueError("memory.words weighs words by the documents: set memory.fit_scale, too")
    if memory.encoder == "lm" and encoder_params is None:
      raise ValueError("memory.encoder is lm, but a model from scratch embeds nothing yet: set init, or use token_bag")
    self.task, self.model, self.memory_config, self.mesh = task, model, memory, mesh
    end = task.template.end_of_turn.name
    self.control: ControlTokens = control_tokens(task.tokenizer, task.notice, end)
    self.encoder = self._make_encoder(encoder_params)
    if constants:
      self.encoder.constants = constants
    self._shared: tuple[Corpus, MemoryState] | None = None
    self._build = jax.jit(self._build_memory)
    self._embed = jax.jit(self._embed_rows)
    self._lay_out = jax.jit(lambda params: unstack(model, for_decoding(model, params, mesh)))
    static, rows = ("config", "kind", "repeats"), batch_sharding(mesh)
    self._run = jax.jit(self._run_traced, static_argnames=static, out_shardings=rows)

  def memory(self, corpus: Corpus) -> MemoryState:
    """Return the memory of a corpus; it is kept until another corpus object comes."""
    if self._shared is not None and self._shared[0] is corpus:
      return self._shared[1]
    if not self.encoder.constants:
      self._fit_encoder()
    elif self.memory_config.fit_scale:
      self._fit_scale()
    # every process has the whole corpus, since any question may find any document
    inputs = jax.device_put(self._padded(corpus), batch_sharding(self.mesh))
    memory = self._build(*self._embedded(corpus), inputs)
    self._shared = (corpus, memory)
    return memory

  def questions(self, split: str, indices: Indices) -> SearchBatch:
    """Return those of the questions that this process asks, with the documents of all."""
    return taken(self.task.batch(split, indices), own_rows(self.mesh, len(indices)))

  def run(
    self,
    params: Params,
    batch: SearchBatch,
    config: RolloutConfig,
    key: PRNGKey,
    *,
    repeats: int = 1,
    kind: RetrieverKind = "memory",
    seen: np.ndarray | None = None,
  ) -> Episodes:
    """Roll every question out `repeats` times; rows of one question are neighbours. `batch` is that of `questions`.

    `seen` int32 [Q, N] are slots of documents that the prompts show, which a distinct search leaves out.
    """
    memory = self.memory(batch.corpus)
    inputs = spread(_inputs(batch, seen), self.mesh)
    done = self._run(params, self.encoder.params, memory, *inputs, key, config=config, kind=kind, repeats=repeats)
    host = own_part(done)
    return Episodes(done, host, read_transcripts(host, self.control), batch, repeats)

  def run_on_host(
    self, params: Params, batch: SearchBatch, config: RolloutConfig, key: PRNGKey, retrieve: HostRetrieve
  ) -> Episodes:
    """Roll every question out once with a Python retriever: the same hops, one compiled program per turn."""
    policy = Policy(self.model, self._lay_out(params), config, self.control)
    prompts, lengths, *questions = map(jnp.asarray, _inputs(batch)[:4])
    done = rollout_on_host(policy, prompts, lengths, retrieve, self.task.document_tokens, key, Queries(*questions))
    host = fetch(done)
    return Episodes(done, host, read_transcripts(host, self.control), batch, 1)

  def trace(
    self,
    params: Params,
    batch: SearchBatch,
    config: RolloutConfig,
    *,
    repeats: int,
    kind: RetrieverKind,
    seen: np.ndarray | None = None,
  ) -> jax.stages.Traced:
    """Trace the rollout of a batch of these shapes for the devices of the mesh, which need not exist."""
    everywhere, rows = replicated(self.mesh), batch_sharding(self.mesh)
    encoder = abstract(jax.eval_shape(lambda: nn.unbox(self.encoder.init(jax.random.key(0)))), everywhere)
    if isinstance(self.encoder, LMEncoder):
      encoder = {**encoder, "model": abstract(encoder["model"], param_shardings(self.model, self.mesh))}
    corpus, real = self._padded(batch.corpus)
    embedded = jax.eval_shape(self.encoder.apply, encoder, corpus.keys, corpus.key_lengths)
    memory = jax.eval_shape(self._build_memory, [embedded], np.arange(len(real)), (corpus, real))
    memory = jax.tree.map(lambda x: abstract(x, rows if x.ndim else everywhere), memory)
    inputs = abstract(_inputs(batch, seen), rows)
    key = abstract(jax.eval_shape(lambda: jax.random.key(0)), everywhere)
    return self._run.trace(params, encoder, memory, *inputs, key, config=config, kind=kind, repeats=repeats)

  def search(self, batch: SearchBatch, top_k: int) -> np.ndarray:
    """Search the memory once for every question as it is written; return the slots, int32 [B, top_k]."""
    memory, encoder = self.memory(batch.corpus), self.encoder

    @jax.jit
    def found(params: Params, memory: MemoryState) -> ArrayLike:
      embedded = encoder.apply(encoder.query_params(params), batch.questions, batch.question_lengths)
      method = self.memory_config.method
      return search(memory, embedded, top_k, group_ids=jnp.asarray(batch.group_ids), method=method).slots

    return np.asarray(fetch(found(encoder.params, memory)))

  def score(self, episodes: Episodes) -> Scores:
    """Score the answers and the found slots against the right answers and the gold slots of the questions."""
    transcripts, slots, batch = episodes.transcripts, episodes.host.slots, episodes.batch
    row = np.arange(len(transcripts)) // episodes.repeats
    gold = batch.gold[row]  # [B, G]
    wanted = gold >= 0
    found = (slots.reshape(len(row), -1)[:, :, None] == gold[:, None, :]).any(axis=1) & wanted
    recall = found.sum(axis=1) / np.maximum(wanted.sum(axis=1), 1)
    first = (slots[:, 0] == gold[:, :1]).any(axis=1) if slots.shape[1] else np.zeros(len(row), bool)
    said = [self.task.tokenizer.decode(t.answer, skip_special=True) if t.answer else "" for t in transcripts]
    pairs = [(answer, batch.answers[int(i)]) for answer, i in zip(said, row, strict=True)]
    columns = (
      [exact_match(*pair) for pair in pairs],
      [hotpot_f1(*pair) for pair in pairs],
      first & wanted[:, 0],
      recall,
      recall == 1,
      episodes.host.searches,
      [t.valid for t in transcripts],
    )
    return Scores(*(np.asarray(column, np.float32) for column in columns))

  def _make_encoder(self, params: Params | None) -> TokenEncoder:
    tokenizer = self.task.tokenizer
    words, width = self.memory_config.words, self.memory_config.d_embed
    if self.memory_config.encoder == "lm" and params is not None:
      hybrid = partial(HybridLMEncoder, words=words, word_width=width)
      return (hybrid if words else LMEncoder)(self.model, params, tokenizer)
    special = tuple(tokenizer.special.values())
    return TokenBagEncoder(width, self.model.padded_vocab, tokenizer.encode, special)

  def _fit_encoder(self) -> None:
    self.encoder.fit_tokens(self._training_keys)
    if isinstance(self.encoder, LMEncoder):
      size = self.task.size("train")
      asked = self.task.batch("train", range(SAMPLE if size is None else min(size, SAMPLE)))
      self.encoder.fit_queries(_rows(asked.questions, asked.question_lengths))

  def _fit_scale(self) -> None:
    assert isinstance(self.encoder, LMEncoder)
    self.encoder.fit_scale_to_tokens(self._training_keys)

  @property
  def _training_keys(self) -> list[list[int]]:
    # always the same documents: the encoder of a resumed run must not depend on the corpus that comes first
    corpus = self.task.batch("train", [0]).corpus
    return _rows(corpus.keys, corpus.key_lengths)

  def _padded(self, corpus: Corpus) -> tuple[Corpus, np.ndarray]:
    """Pad the corpus to a multiple of the mesh's shards; return it and a mask of its real rows, bool [C]."""
    n = len(corpus.keys)
    padding = -n % batch_shards(self.mesh)
    padded = Corpus(*(np.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1)) for x in corpus))
    return padded, np.arange(n + padding) < n

  def _embedded(self, corpus: Corpus) -> tuple[list[Array], np.ndarray]:
    """Embed the keys by their lengths; return the parts, and the place in them of each row of the memory.

    The longest key of a collection may be six times as long as its mean. Widths are powers of two from `SHORT` on, so
    that a collection takes few programs, and one of short keys a single one.
    """
    widths = [min(max(power_of_two(n), SHORT), corpus.keys.shape[1]) for n in corpus.key_lengths.tolist()]
    parts, order = [], []
    for width in sorted(set(widths)):
      these = [row for row, of in enumerate(widths) if of == width]
      these += these[:1] * (-len(these) % batch_shards(self.mesh))  # rows that only fill the part
      keys = jax.device_put((corpus.keys[these, :width], corpus.key_lengths[these]), batch_sharding(self.mesh))
      parts.append(self._embed(self.encoder.params, *keys))
      order += these
    places = np.zeros(len(widths), np.int32)
    places[order] = np.arange(len(order))
    return parts, np.pad(places, (0, -len(places) % batch_shards(self.mesh)))

  def _embed_rows(self, encoder_params: Any, keys_NxT: Array, lengths_N: Array) -> Array:
    # in batches: the encoder's activations for a key are a thousand times as large as its embedding
    one = lambda key: self.encoder.apply(encoder_params, key[0][None], key[1][None])[0]
    return jax.lax.map(one, (keys_NxT, lengths_N), batch_size=max(EMBED_TOKENS // keys_NxT.shape[1], 1))

  def _build_memory(self, parts: list[Array], places: ArrayLike, inputs: tuple[Corpus, ArrayLike]) -> MemoryState:
    corpus, real = inputs
    embedded = jnp.concatenate(parts)[places]
    dtype, width = self.memory_config.dtype, corpus.tokens.shape[1]
    state = init_memory(len(corpus.keys), embedded.shape[1], chunk_tokens=width, dtype=dtype)
    documents = {"group_ids": corpus.group_ids, "tokens": corpus.tokens, "lengths": corpus.lengths}
    rows = batch_sharding(self.mesh)
    written = write(state, embedded, mask=real, **documents)
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, rows) if x.ndim else x, written)

  def _query_params(self, params: Any) -> Any:
    """Lay the encoder of queries out as the loop reads it."""
    if isinstance(self.encoder, LMEncoder):
      params = {**params, "model": for_decoding(self.encoder.config, params["model"], self.mesh)}
    return self.encoder.query_params(params)

  def _run_traced(self, params, encoder_params, memory, *inputs, config, kind, repeats) -> Rollout:
    *of_questions, key = inputs
    prompts, lengths, asked, asked_lengths, gold, group_ids, *seen = of_questions
    rollout_key, random_key = jax.random.split(key)
    retrieve = make_retrieve(
      kind,
      memory,
      partial(self.encoder.apply, self._query_params(encoder_params)),
      config.documents_per_search(sum(slots.shape[1] for slots in seen)),
      group_ids=jnp.repeat(group_ids, repeats),
      gold_BxG=jnp.repeat(gold, repeats, axis=0),
      key=random_key,
      method=self.memory_config.method,
      mesh=self.mesh,
    )
    policy = Policy(self.model, self._lay_out(params), config, self.control)
    questions = Queries(asked, asked_lengths)
    with whole(True):
      return rollout(policy, prompts, lengths, retrieve, memory.tokens.shape[1], rollout_key, questions, repeats, *seen)


def evaluate(
  runner: RolloutRunner,
  params: Params,
  split: str,
  n: int,
  batch_size: int,
  rollout_config: RolloutConfig,
  kind: RetrieverKind | HostRetrieve = "memory",
) -> Scores:
  """Decode the first `n` questions of a split greedily and score them; the last batch is padded, then cut."""
  size = runner.task.size(split)
  n = n if size is None else min(n, size)
  greedy = dataclasses.replace(rollout_config, sampling=SamplingConfig(temperature=0.0))
  on_host = callable(kind)  # every process then rolls out all questions
  asked = runner.task.batch if on_host else runner.questions
  make = lambda i: asked(split, np.minimum(np.arange(i * batch_size, (i + 1) * batch_size), n - 1))
  parts = []
  for start, batch in zip(range(0, n, batch_size), batches(make, 0, -(-n // batch_size)), strict=True):
    key = jax.random.key(start)
    if on_host:
      scores = runner.score(runner.run_on_host(params, batch, greedy, key, kind))
    else:
      scores = gathered(runner.score(runner.run(params, batch, greedy, key, kind=kind)), runner.mesh)
    parts.append(Scores(*(column[: n - start] for column in scores)))
  return Scores(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def _rows(tokens: np.ndarray, lengths: np.ndarray) -> list[list[int]]:
  return [row[:n].tolist() for row, n in zip(tokens, lengths, strict=True)]


def _inputs(batch: SearchBatch, seen: np.ndarray | None = None) -> tuple[np.ndarray, ...]:
  questions = batch.prompts, batch.lengths, batch.questions, batch.question_lengths, batch.gold, batch.group_ids
  return questions if seen is None else (*questions, seen)
