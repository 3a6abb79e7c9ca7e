"""Phase 1 of the Self-RAG memory: a small language model from scratch, on packed text.

python launch/train.py --config=configs/pretrain.py                    lists of facts and questions, made as it goes
python launch/train.py --config=configs/pretrain.py:sentence           any variant of selfrag_jax/tasks/facts.py
"""

from typing import Any, NamedTuple

import ml_collections

from selfrag_jax.tasks.facts import ASKABLE, WORDINGS

MODELS = {
  "hybrid": {"block_pattern": "MTM", "n_layers": 3, "mlp_dim": 192},
  "transformer": {"block_pattern": "TTT", "n_layers": 3, "mlp_dim": 104},
  "mamba": {"block_pattern": "MMMM", "n_layers": 4, "mlp_dim": 192},
}
ONE_QUESTION = tuple(variant for variant in WORDINGS if variant not in ASKABLE)  # about a list or a context


class Steps(NamedTuple):
  """How long each phase is."""

  pretrain: int
  memory: int
  position_recall: int


class Needed(NamedTuple):
  """The validation losses, in nats, that the next phase needs; 4.2 is chance, 0 asks for nothing."""

  pretrain: float
  memory: float


STEPS = dict.fromkeys(WORDINGS, Steps(1000, 150, 100)) | dict.fromkeys(ONE_QUESTION, Steps(2000, 400, 150))
STEPS |= {"paraphrase": Steps(3000, 400, 150), "text": Steps(500, 150, 100)}
# nobody learns to use a memory who cannot read it
NEEDED = dict.fromkeys(WORDINGS, Needed(0.1, 1.0)) | {"text": Needed(0.0, 0.0)}
# from one fact to another is learnt when the memory is there; a value before its name is seldom found in long lists
NEEDED |= {"two_fact": Needed(0.3, 1.5), "paraphrase": Needed(0.3, 1.0)}


def get_config(variant: str = "kv") -> ml_collections.ConfigDict:
  """Return the config of a variant of the facts, or of text files."""
  if variant not in STEPS:
    raise ValueError(f"no variant {variant!r}; one of {', '.join(WORDINGS)}, text")
  of_files = variant == "text"
  return ml_collections.ConfigDict(
    {
      "experiment": "self_rag",
      "seed": 0,
      "workdir": f"runs/pretrain_{variant}",
      "mesh": (-1, 1, 1),  # data, fsdp, tensor; -1 takes the devices that are left
      "init": "",  # a workdir: what its last phase left is where the next phase starts
      "data": text() if of_files else facts(variant),
      "model": {
        "d_model": 128 if of_files else 64,
        "n_heads": 4 if of_files else 2,  # wide heads tell names apart
        **MODELS["hybrid"],
        "dtype": "auto",  # bfloat16 on accelerators, float32 on CPUs
        "ssm_state": 16,
        "ssm_head_dim": 32,
        "ssm_chunk": 32,
        "init_scale": 0.1,
      },
      "self_rag": {
        "chunk_size": 32,
        "top_k": 2 if of_files else 16,  # chunks: the context budget
        "searches": 2 if variant == "two_fact" else 1,  # the second asks with what the first has found
        "retrieval_method": "cosine",
        "embed_pooling": "mean",
        # as they were read: the newest of two values stands last. But what a second search finds is read behind the
        # first, and of three wordings one is read well only where it stands first
        "order": "score" if variant in ("two_fact", "paraphrase") else "position",
        "memory_dropout": 0.1,
        "contrastive_weight": 1.0,
      },
      "pretrain": {
        "steps": STEPS[variant].pretrain,
        "batch_size": 16,
        "valid_rows": 256,
        "needed_loss": NEEDED[variant].pretrain,
        **optimizer(),
      },
      "loop": {
        "checkpoint_every": 100,
        "keep_checkpoints": 2,
        "eval_every": 100,
        "log_every": 20,
        "preempted_exit_code": 143,
      },
    }
  )


def facts(variant: str) -> dict[str, Any]:
  """Return lists of facts to read and to remember."""
  # lists in the text to pretrain on: facts, of which the last so many are asked for (None: all), whether names are
  # alike, whose words. Reading what a search finds is learnt from names that are alike; recall at all from lists of
  # pairs that repeat themselves often, but of few sentences: the other way round neither is learnt in 500 steps.
  text: tuple[tuple[Any, ...], ...] = ((4,), (4,), (8, None, True), (16, None, True))
  if variant.startswith("kv"):
    text = ((4,), (8,), (16,), (16, None, True))
  elif variant == "paraphrase":  # recall is learnt from one wording first: from three at once it is not
    text = ((4, None, False, "sentence"), (8, None, True, "sentence"), (4,), (4,), (4,), (8, None, True))
  elif variant in ONE_QUESTION:  # recall is learnt from lists in which any fact is asked for
    of_others = ((4, None, False, "sentence"), (8, None, True, "sentence"), (16, None, True, "sentence"))
    text = (*of_others, (4,), (4,), (8, None, True))
  return {
    "name": "facts",
    "variant": variant,
    "n_facts": 32 if variant in ONE_QUESTION else 128,  # of a context to remember
    "n_questions": 1 if variant in ONE_QUESTION else 16,  # about it
    "text": text,
    "seed": 0,
  }


def text() -> dict[str, Any]:
  """Return text files."""
  return {
    "name": "text",
    "path": "",
    "tokenizer": "byte",  # or a SentencePiece .model file, or a folder with the tokenizer.json of a byte-level BPE
    "row_tokens": 256,
    "n_chunks": 16,  # of a context to remember
    "chunk_tokens": 32,
    "seed": 0,
  }


def optimizer(name: str = "muon", learning_rate: float = 1e-2) -> dict[str, Any]:
  """Return the optimizer of a tiny model. Muon, because AdamW takes several times as many steps to learn to recall."""
  return {
    "accumulate": 1,
    "optimizer": {
      "name": name,
      "learning_rate": learning_rate,
      "schedule": "cosine",
      "warmup_steps": 20,
      "final_fraction": 0.1,
      "b1": 0.9,
      "b2": 0.95,
      "weight_decay": 0.0,
      "clip_norm": 1.0,
    },
  }
