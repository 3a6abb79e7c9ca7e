"""A small form of every phase, in float64: neither a mesh, nor accumulation, nor several processes may change what it
learns.

  python tests/train/every_phase.py FILE NAME ...   some of them, as one of the processes of JAX_COORDINATOR_ADDRESS
"""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from selfrag_jax import hosts
from selfrag_jax.encoders.bert import BertConfig, init_bert
from selfrag_jax.encoders.language_model import LMEncoder
from selfrag_jax.generate.augment import memory_tokens
from selfrag_jax.generate.rollout import RolloutConfig
from selfrag_jax.mesh import make_mesh
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.lm import LM, init_params
from selfrag_jax.retrieval.beir import Judged
from selfrag_jax.retrieval.cross_encoder import CrossEncoder
from selfrag_jax.retrieval.document import Document
from selfrag_jax.self_rag import SelfRAGConfig
from selfrag_jax.tasks.context_batch import of_facts
from selfrag_jax.tasks.facts import Facts
from selfrag_jax.tasks.ranking import RankingTask
from selfrag_jax.tasks.two_hop_search import TwoHopSearch
from selfrag_jax.text.tokenizer import ByteTokenizer
from selfrag_jax.text.wordpiece import SPECIAL, WordPieceTokenizer
from selfrag_jax.train.lora import LoRAConfig
from selfrag_jax.train.memory_reader import MemoryReader
from selfrag_jax.train.phases.base import GradientPhase
from selfrag_jax.train.phases.encoder import EncoderPhase, EncoderPhaseConfig
from selfrag_jax.train.phases.memory import MemoryPhase, MemoryPhaseConfig
from selfrag_jax.train.phases.pretrain import Pretrain, PretrainConfig
from selfrag_jax.train.phases.refrag import Refrag, RLConfig
from selfrag_jax.train.phases.rerank import RerankPhase, RerankPhaseConfig
from selfrag_jax.train.phases.reward_model import RewardModelConfig, RewardModelPhase
from selfrag_jax.train.phases.sft import SFT, SFTConfig
from selfrag_jax.train.rollouts import MemoryConfig, RolloutRunner

STEPS, ROWS = 20, 16
SEARCH, FACTS, BYTES = TwoHopSearch(n_entities=8, n_relations=2), Facts("sentence", 12), ByteTokenizer()
NAMES = [f"name{a}{b}" for a in "abcdef" for b in "abcd"]
JUDGED = Judged(
  [Document(name, content=f"the code of {name} is here") for name in NAMES],
  {name: f"where is {name} ?" for name in NAMES},
  {name: {name: 1.0} for name in NAMES},
)
WORDS = WordPieceTokenizer([*SPECIAL, *NAMES, "the", "code", "of", "is", "here", "where", "?"])
ROLLOUT = RolloutConfig(2, 1, 4, 2, search_for="question_and_query")


def model(vocab_size: int, **changes) -> ModelConfig:
  sizes = {"d_model": 32, "n_layers": 2, "n_heads": 2, "block_pattern": "TM", "ssm_state": 8, "ssm_head_dim": 16}
  return ModelConfig(
    vocab_size=vocab_size, **sizes | {"ssm_chunk": 16, "init_scale": 0.2, "dtype": "float64", "param_dtype": "float64"}
    | changes
  )  # fmt: skip


def params_of(config: ModelConfig) -> dict:
  return nn.unbox(init_params(config, jax.random.key(0)))


def in_float64(params: dict) -> dict:
  return jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), params)


def rows(split: str, indices) -> dict[str, np.ndarray]:
  """Text of two documents a row, with padding."""
  tokens = np.stack([np.random.default_rng([split == "valid", i]).integers(0, 255, 24) for i in indices])
  segments = np.where(np.arange(24) < 21, 1 + (np.arange(24) > 9), 0)[None].repeat(len(tokens), 0)
  return {"tokens": tokens.astype(np.int32), "segment_ids": segments.astype(np.int32), "mask": segments > 0}


def pair(index: int) -> tuple[list[int], list[int]]:
  first, other, *middle = np.random.default_rng(index).permutation(40)[: 3 + index % 6].tolist()
  return [first, *middle, first], [first, *middle, other]


def phases(mesh, accumulate: int = 1) -> dict[str, Callable[[], GradientPhase]]:
  """Return what makes each phase: from fresh parameters, or from random ones that are always the same."""
  start = {"mesh": mesh, "seed": 3, "params": None, "evaluate": lambda _: {}}
  size = {"steps": STEPS, "batch_size": ROWS, "accumulate": accumulate}
  plain, search, facts = model(BYTES.vocab_size), model(SEARCH.tokenizer.vocab_size), model(FACTS.tokenizer.vocab_size)

  def pretrain() -> Pretrain:
    return Pretrain("pretrain", rows, plain, PretrainConfig(**size, valid_rows=ROWS), mesh=mesh, seed=3)

  def sft() -> SFT:
    return SFT("sft", SEARCH, search, SFTConfig(**size, max_tokens=64), max_hops=2, **start)

  def lora() -> SFT:
    config = SFTConfig(**size, max_tokens=64, lora=LoRAConfig(rank=2))
    return SFT("lora", SEARCH, search, config, max_hops=2, **start | {"params": params_of(search)})

  def memory() -> MemoryPhase:
    settings = SelfRAGConfig(top_k=3, chunk_size=8, order="position", memory_dropout=0.3, contrastive_weight=0.5)
    reader = MemoryReader(facts, settings, memory_tokens(FACTS.tokenizer), mesh)
    contexts = lambda indices: of_facts(FACTS.lists("train", indices, 3))
    return MemoryPhase("memory", contexts, reader, MemoryPhaseConfig(**size), **start | {"params": params_of(facts)})

  def reward_model() -> RewardModelPhase:
    return RewardModelPhase("reward_model", pair, None, plain, RewardModelConfig(**size, max_tokens=12), **start)

  def rerank() -> RerankPhase:
    bert = BertConfig(WORDS.vocab_size, 32, 2, 4, 64, 16, max_tokens=16, dtype="float64", labels=1)
    params = in_float64(nn.unbox(init_bert(bert, jax.random.key(1))))
    config = RerankPhaseConfig(**size, negatives=3, depth=8, tokens=16)
    cross = CrossEncoder(bert, params, WORDS)
    return RerankPhase("rerank", RankingTask(JUDGED, 3, mined=8), cross, config, **start | {"params": params})

  return {
    "pretrain": pretrain,
    "sft": sft,
    "lora": lora,
    "memory": memory,
    "reward_model": reward_model,
    "rerank": rerank,
    "encoder": lambda: encoding(mesh, accumulate),
    "rl": lambda: reinforced(mesh, accumulate),
  }


def encoding(mesh, accumulate: int) -> EncoderPhase:
  encoder = LMEncoder(model(BYTES.vocab_size), params_of(model(BYTES.vocab_size)), BYTES)
  encoder.fit([document.content for document in JUDGED.documents])
  config = EncoderPhaseConfig(
    steps=STEPS, batch_size=ROWS, query_tokens=16, document_tokens=24, language_weight=0.5, accumulate=accumulate
  )
  start = {"mesh": mesh, "seed": 3, "params": in_float64(encoder.params), "evaluate": lambda _: {}}
  return EncoderPhase("encoder", RankingTask(JUDGED, 1), encoder, config, **start)


def reinforced(mesh, accumulate: int, steps: int = 1) -> Refrag:
  """Make the reinforcement of a policy that was pushed to begin with a search, with all that a group can hold."""
  config = model(SEARCH.tokenizer.vocab_size, tie_embeddings=False)
  params = params_of(config)
  asked, head = SEARCH.batch("train", range(8)), params["params"]["unembed"]
  beginning = jax.jit(LM(config).apply)(params, asked.prompts)[:, -1].mean(axis=0)
  params["params"]["unembed"] = head.at[SEARCH.tokenizer.special["<|search_start|>"]].set(beginning)
  runner = RolloutRunner(SEARCH, config, MemoryConfig(d_embed=32), mesh)
  rl = RLConfig(
    steps=steps, questions_per_step=ROWS, rollouts_per_question=4, advantage="reinforce", resample=2, experts=True,
    kl_weight=0.1, accumulate=accumulate,
  )  # fmt: skip
  return Refrag("rl", runner, config, rl, ROLLOUT, mesh=mesh, seed=3, params=params, evaluate=lambda _: {})


def told(phase: GradientPhase, mesh) -> list[dict[str, float]]:
  """Train a phase and return the metrics of its steps."""
  with jax.set_mesh(mesh):
    state, metrics = phase.initial_state(), []
    for batch in phase.batches(0):
      state, found = phase.step(state, batch)
      metrics.append({name: float(value) for name, value in found.items()})
  return metrics


def results(mesh, names: Sequence[str], accumulate: int = 1) -> dict[str, list[dict[str, float]]]:
  """Train these phases and return the metrics of their steps."""
  return {name: told(phases(mesh, accumulate)[name](), mesh) for name in names}


def main(path: str, *names: str) -> None:
  """Train phases on the devices of all processes; the first process writes the metrics."""
  hosts.join(hosts.find())
  jax.config.update("jax_enable_x64", True)
  found = results(make_mesh(data=-1, fsdp=2), names)
  if jax.process_index() == 0:
    Path(path).write_text(json.dumps(found))


if __name__ == "__main__":
  main(*sys.argv[1:])
