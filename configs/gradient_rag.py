"""Gradient-RAG: textual gradients improve prompts or a program, with a memory of all past critiques.

  python launch/optimize_prompt.py --config=configs/gradient_rag.py
  python launch/optimize_prompt.py --config=configs/gradient_rag.py --compare=retrieval,window,none
  python launch/optimize_prompt.py --config=configs/gradient_rag.py:bbh --config.task.path=object_counting.json \\
    --config.engines.model.name=qwen3 --config.engines.model.base_url=http://localhost:11434/v1

Three variants need no network and take seconds to a minute; their critic is scripted, and wrong in 40 % of its answers:
  rulebook (default)  the Latent Rulebook: a prompt has room for some of the rules that its cases need
  pipeline            the Latent Rulebook in two calls of the model, whose prompts are learned together
  program             a Python function against unit tests; `task.path` takes a JSON file with another `program` and its
                      `tests` (each a `call` and the literal `result`), which needs engines by name as critic and
                      optimizer. Programs run in a sandbox, as strict as the system allows: the launcher says how strict
One reads a folder of questions and needs no network either:
  router              keyword rules that say which article a question is about, by the words that its questions share;
                      `task.path` is a folder in the layout of BEIR whose passages have their article as title, such as
                      SQuAD's; a rule is right or wrong on real questions, and no noise is added. About a minute
Two need files and models:
  bbh, gsm8k          a file of BIG-Bench-Hard or GSM8K; with `task.calls=2`, a first call takes notes for the second

An engine is a model behind an endpoint that speaks OpenAI's protocol, or `local:` with a value of launch/generate.py's
--model, such as `local:smollm2-135m`. The critic and the optimizer should follow instructions well; the model may be
small.
"""

from collections.abc import Mapping

import ml_collections

from selfrag_jax.experiments import gradient_rag
from selfrag_jax.settings import full_config

VARIANTS = ("rulebook", "pipeline", "router", "program", "bbh", "gsm8k")


def get_config(variant: str = "rulebook") -> ml_collections.ConfigDict:
  """Return the config of a variant."""
  if variant not in VARIANTS:
    raise ValueError(f"configs/gradient_rag.py has the variants {', '.join(VARIANTS)}, not {variant!r}")
  engine = {"name": "gpt-4o-mini" if variant in ("bbh", "gsm8k") else "scripted"}
  differences = {
    "experiment": "gradient_rag",
    "workdir": f"runs/gradient_rag_{variant}",
    "seed": 0,  # draws the split and the order of the cases
    "task": task(variant),
    "engines": dict.fromkeys(("model", "critic", "optimizer"), engine),
    "cache": True,  # keep the answers of models that are not scripted in the workdir: no call is paid for twice
    "memory": "retrieval",  # none, window or retrieval
    "optimizer": {
      "steps": {"rulebook": 120, "router": 120, "pipeline": 60, "program": 40}.get(variant, 30),
      "reject_worse": variant not in ("rulebook", "router"),
    },
  }
  # a task has only some of the keys of the section
  return full_config({**gradient_rag.SECTIONS, "task": Mapping}, differences)


def task(variant: str) -> dict[str, object]:
  """Return the section `task` of a variant."""
  if variant == "program":
    return {"name": "program", "path": "", "noise": 0.4, "sizes": {"train": 60, "valid": 30, "test": 60}}
  if variant == "router":
    return {"name": "router", "path": "", "capacity": 64, "sizes": {"train": 360, "valid": 100, "test": 600}}
  if variant in ("bbh", "gsm8k"):
    return {"name": variant, "path": "", "calls": 1, "sizes": {"train": 100, "valid": 50, "test": 100}}
  few = variant == "pipeline"
  return {
    "name": "rulebook",
    "calls": 2 if few else 1,
    "n_topics": 8 if few else 60,
    "n_actions": 20,
    "noise": 0.4,  # the share of the critic's answers that are wrong
    "capacity": 40 if few else 24,  # rules in a prompt
    "sizes": {"train": 360, "valid": 100, "test": 300},
  }
