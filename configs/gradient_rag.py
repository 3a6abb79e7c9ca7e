"""A prompt is optimized by textual gradients, with a memory of every critique that there ever was.

  python launch/optimize_prompt.py --config=configs/gradient_rag.py
  python launch/optimize_prompt.py --config=configs/gradient_rag.py --compare=retrieval,window,none
  python launch/optimize_prompt.py --config=configs/gradient_rag.py:bbh --config.task.path=object_counting.json \\
    --config.engines.model.name=qwen3 --config.engines.model.base_url=http://localhost:11434/v1

The default needs no network and takes seconds: the Latent Rulebook, whose model, critic (wrong in 40 % of its answers)
and optimizer are scripted. `:bbh` and `:gsm8k` take the files of BIG-Bench-Hard and GSM8K, and models behind endpoints
that speak OpenAI's protocol; the key is read from OPENAI_API_KEY. The critic and the optimizer should follow
instructions well; the model may be small.
"""

import ml_collections


def get_config(variant: str = "rulebook") -> ml_collections.ConfigDict:
  """Return the config: `rulebook`, `bbh` or `gsm8k`."""
  if variant not in ("rulebook", "bbh", "gsm8k"):
    raise ValueError(f"configs/gradient_rag.py has the variants rulebook, bbh and gsm8k, not {variant!r}")
  is_scripted = variant == "rulebook"
  engine = scripted() if is_scripted else endpoint()
  rulebook = {"n_topics": 24, "n_actions": 20, "noise": 0.4, "capacity": 24}
  sizes = {"train": 240, "valid": 100, "test": 300} if is_scripted else {"train": 100, "valid": 50, "test": 100}
  return ml_collections.ConfigDict(
    {
      "experiment": "gradient_rag",
      "workdir": f"runs/gradient_rag_{variant}",
      "seed": 0,  # of the split and of the order of the cases
      "task": {"name": variant, "path": "", "sizes": sizes, **(rulebook if is_scripted else {})},
      "engines": {part: dict(engine) for part in ("model", "critic", "optimizer")},
      "memory": "retrieval",  # none, window or retrieval
      "rag": {"k": 12, "tokens": 1500, "past_tokens": 500, "merge": "concatenate", "min_score": 0.1, "min_ratio": 0.75},
      "optimizer": {
        "steps": 60 if is_scripted else 30,
        "batch_size": 3,
        "reject_worse": True,  # on validation
        "constraints": (),
        "learning_rate": 1.0,  # how much of the words a step may change
        "gradient_memory": 0,
        "momentum_window": 0,
        "on_bad_reply": "keep",
        "retries": 2,
      },
      "budget": {
        "tokens": 0,
        "cost": 0.0,
        "prompt_price": 0.0,
        "completion_price": 0.0,
      },  # 0: none; prices of a million
    }
  )


def scripted() -> dict[str, object]:
  """Return the engine of a task that brings its own."""
  return {"name": "scripted", "base_url": ""}


def endpoint() -> dict[str, object]:
  """Return an engine behind an endpoint."""
  return {
    "name": "gpt-4o-mini",
    "base_url": "",  # OpenAI's
    "temperature": 0.0,
    "max_tokens": 2000,
    "context_tokens": 32_768,
    "concurrency": 8,
  }
