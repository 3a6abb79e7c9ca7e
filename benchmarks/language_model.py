"""A Llama of 135M parameters here and in transformers on torch, in float32: a training step, a prefill, decoding.

  python benchmarks/language_model.py [--turns=5] [--bfloat16]

Both load the same random weights from one file, in the shape of SmolLM2-135M. Each library has a process of its own,
with its default threads, and they take turns. First both compute the loss of one batch, which must agree to 1e-4. Then
they are timed on a training step (forward, backward, clipping, AdamW) of 4 rows of 256 tokens; a prefill of the same
rows into a cache, with the logits of the last token; and greedy decoding of 32 tokens after prompts of 64, for one row
and for 16. Prints the median time over the turns, and the ratio of the two times (above 1: faster here) with its
median, lowest and highest turn. For one row, it also prints the bytes of weights that decoding reads per second, beside
the rate at which the same bytes are summed. With `--bfloat16` the inputs of products are rounded, here by
`matmul_dtype`, there by autocast, and the losses must agree to 1e-2. On a GPU both are on it, and products in float32
are TF32 in both, which is XLA's default there. Needs torch and transformers: `pip install -e '.[test]'`.
"""

import dataclasses
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from absl import app, flags

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

TURNS = flags.DEFINE_integer("turns", 5, "Timed turns of each.", lower_bound=1)
ROUNDED = flags.DEFINE_bool("bfloat16", False, "Round the inputs of products.")
ROWS, TIME, PROMPT, NEW = 4, 256, 64, 32
PAUSE = 0.5  # seconds between turns, until the idle threads of the turn before have stopped spinning
# of SmolLM2-135M
SHAPE = {
  "vocab_size": 49_152, "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
  "num_key_value_heads": 3, "intermediate_size": 1536, "tie_word_embeddings": True, "max_position_embeddings": 2048,
}  # fmt: skip
TASKS = {"training step": ROWS * TIME, "prefill": ROWS * TIME, "decode, 1 row": NEW, "decode, 16 rows": NEW * 16}


def tokens(rows: int, time: int) -> np.ndarray:
  """Draw the same tokens for both, int32 [rows, time]."""
  return np.random.default_rng(0).integers(SHAPE["vocab_size"], size=(rows, time)).astype(np.int32)


def ours(folder: str, rounded: bool) -> dict[str, Callable[[], float]]:
  """Return the timed tasks by name, each a function that returns seconds, and `loss`."""
  from selfrag_jax.mesh import configure_xla

  configure_xla()
  from functools import partial

  import jax
  import jax.numpy as jnp

  from selfrag_jax.generate.complete import complete
  from selfrag_jax.generate.sampling import GREEDY
  from selfrag_jax.mesh import make_mesh
  from selfrag_jax.model.cache import init_cache
  from selfrag_jax.model.lm import LM, init_params, unstack
  from selfrag_jax.model.pretrained import load_pretrained
  from selfrag_jax.train.losses import masked_lm_loss
  from selfrag_jax.train.optimizer import OptimizerConfig, make_optimizer
  from selfrag_jax.train.state import make_update, state_from_params

  loaded = load_pretrained(folder)
  config = dataclasses.replace(loaded.config, matmul_dtype="bfloat16" if rounded else None)
  flat = unstack(config, loaded.params)
  optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-5, weight_decay=0.01), 1000)
  state = state_from_params(loaded.params, optimizer, make_mesh(), partial(init_params, config), 0)
  update = make_update(partial(masked_lm_loss, config), optimizer)
  rows = jnp.asarray(tokens(ROWS, TIME))
  batch = {"tokens": rows, "segment_ids": jnp.ones_like(rows), "mask": jnp.ones(rows.shape, bool).at[:, 0].set(False)}
  lm = LM(config, unrolled=True)

  @jax.jit
  def prefill(params, rows):
    lengths = jnp.full(len(rows), rows.shape[1], jnp.int32)
    hidden, cache = lm.apply(params, rows, lengths, init_cache(config, *rows.shape), method="extend")
    return lm.apply(params, hidden[:, -1], method="logits"), cache

  @partial(jax.jit, static_argnames="new")
  def decode(params, rows, new):
    lengths = jnp.full(len(rows), rows.shape[1], jnp.int32)
    return complete(config, params, rows, lengths, jax.random.key(0), max_new_tokens=new, sampling=GREEDY)

  def seconds(run: Callable) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start

  def step() -> float:
    nonlocal state
    start = time.perf_counter()
    state, metrics = update(state, batch)
    float(metrics["loss"])
    return time.perf_counter() - start

  def decoding(n: int) -> float:
    prompts = jnp.asarray(tokens(n, PROMPT))
    # the compiled loop includes the prompt: subtract the time of a run that decodes one token
    return seconds(lambda: decode(flat, prompts, new=NEW + 1)) - seconds(lambda: decode(flat, prompts, new=1))

  weights = jax.tree.leaves(flat)
  read = jax.jit(lambda weights: sum(jnp.sum(w) for w in weights))
  return {
    "loss": lambda: float(masked_lm_loss(config, loaded.params, batch).loss / batch["mask"].sum()),
    "bytes": lambda: float(sum(w.nbytes for w in weights)),
    "read": lambda: seconds(lambda: read(weights)),
    "training step": step,
    "prefill": lambda: seconds(lambda: prefill(flat, rows)),
    "decode, 1 row": partial(decoding, 1),
    "decode, 16 rows": partial(decoding, 16),
  }


def theirs(folder: str, rounded: bool) -> dict[str, Callable[[], float]]:
  """Return the same tasks for transformers' LlamaForCausalLM on torch."""
  from functools import partial

  import torch
  from transformers import DynamicCache, LlamaForCausalLM

  device = "cuda" if torch.cuda.is_available() else "cpu"
  if device == "cuda":
    torch.set_float32_matmul_precision("high")  # TF32
  autocast = lambda: torch.autocast(device, torch.bfloat16, enabled=rounded)
  model = LlamaForCausalLM.from_pretrained(folder).to(device)
  # training moves `model`; the copy decodes with the first weights, so that both libraries continue alike for long
  frozen = LlamaForCausalLM.from_pretrained(folder).to(device).eval()
  optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.01)
  ids = lambda rows, time: torch.from_numpy(tokens(rows, time)).long().to(device)
  rows = ids(ROWS, TIME)

  def step() -> float:
    start = time.perf_counter()
    optimizer.zero_grad()
    with autocast():
      loss = model(rows, labels=rows, use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    loss.item()
    return time.perf_counter() - start

  # below, an item is copied to the host, which waits for a GPU to finish

  @torch.no_grad()
  def prefill() -> float:
    start = time.perf_counter()
    with autocast():
      frozen(rows, past_key_values=DynamicCache(), logits_to_keep=1).logits[0, 0, 0].item()
    return time.perf_counter() - start

  @torch.no_grad()
  def decoding(n: int) -> float:
    cache = DynamicCache()
    prompts = ids(n, PROMPT)
    with autocast():
      logits = frozen(prompts, past_key_values=cache, logits_to_keep=1).logits
      logits[0, 0, 0].item()
      start = time.perf_counter()
      for _ in range(NEW):
        logits = frozen(logits[:, -1:].argmax(-1), past_key_values=cache).logits
      logits[0, 0, 0].item()
      return time.perf_counter() - start

  weights = [p.data for p in frozen.parameters()]

  def read() -> float:
    start = time.perf_counter()
    sum(w.sum() for w in weights).item()
    return time.perf_counter() - start

  return {
    "loss": lambda: float(frozen(rows, labels=rows).loss),
    "bytes": lambda: float(sum(w.nbytes for w in weights)),
    "read": read,
    "training step": step,
    "prefill": prefill,
    "decode, 1 row": partial(decoding, 1),
    "decode, 16 rows": partial(decoding, 16),
  }


PEERS = {"selfrag_jax": ours, "transformers": theirs}


def work(name: str, folder: str, rounded: bool, pipe: Connection) -> None:
  """Run the tasks that the pipe names and send back their results."""
  tasks = PEERS[name](folder, rounded)
  while (task := pipe.recv()) is not None:
    pipe.send(tasks[task]())


def write_model(folder: str) -> None:
  """Write random weights, in a process of its own, whose memory is free afterwards."""
  import torch
  from transformers import LlamaConfig, LlamaForCausalLM

  torch.manual_seed(0)
  LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(folder)


def main(_: list[str]) -> None:
  """Compare and time."""
  context = multiprocessing.get_context("spawn")
  with tempfile.TemporaryDirectory() as folder:
    writer = context.Process(target=write_model, args=(folder,))
    writer.start()
    writer.join()
    pipes: dict[str, Connection] = {}
    workers = []
    for name in PEERS:
      pipes[name], far = context.Pipe()
      workers.append(context.Process(target=work, args=(name, folder, ROUNDED.value, far), daemon=True))
      workers[-1].start()

    def ask(name: str, task: str) -> float:
      pipes[name].send(task)
      answer = pipes[name].recv()
      time.sleep(PAUSE)
      return answer

    losses = [ask(name, "loss") for name in PEERS]
    gap = abs(losses[0] - losses[1])
    print(f"loss of one batch: {losses[0]:.6f} here, {losses[1]:.6f} there", flush=True)
    for task, amount in TASKS.items():
      for name in PEERS:
        ask(name, task)  # compiles, and warms the caches
      turns = [[ask(name, task) for name in PEERS] for _ in range(TURNS.value)]
      ratios = sorted(there / here for here, there in turns)
      here, there = (statistics.median(column) for column in zip(*turns, strict=True))
      print(
        f"{task:16} {here:7.3f} s {amount / here:8.1f} tok/s here, {there:7.3f} s {amount / there:8.1f} tok/s there: "
        f"{statistics.median(ratios):.2f}x ({ratios[0]:.2f} to {ratios[-1]:.2f})",
        flush=True,
      )
      if task == "decode, 1 row":
        for name, spent in zip(PEERS, (here, there), strict=True):
          size, fastest = ask(name, "bytes"), min(ask(name, "read") for _ in range(TURNS.value))
          print(
            f"  {name}: {size * NEW / spent / 1e9:.1f} GB/s of weights; adding them up {size / fastest / 1e9:.1f} GB/s"
          )
    for pipe in pipes.values():
      pipe.send(None)
    for worker in workers:
      worker.join()
  if not gap <= (1e-2 if ROUNDED.value else 1e-4):
    sys.exit(f"the losses differ by {gap:.1e}")


if __name__ == "__main__":
  app.run(main)
