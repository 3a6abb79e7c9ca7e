"""Losses as pure functions: token log-probabilities, advantages, and the clipped policy loss."""

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.layers import accumulation_dtype
from selfrag_jax.model.likelihood import CHUNK, follows, sequence_log_probs, token_log_probs
from selfrag_jax.model.lm import LM, packed_states
from selfrag_jax.model.vocabulary import on_own_tokens
from selfrag_jax.train.state import LossSums, Mean
from selfrag_jax.typing import Array, Params

Advantage = Literal["mean", "grpo", "rloo", "reinforce"]
FEWEST = 64  # masked tokens of a long row, if there are no more


def masked_lm_loss(config: ModelConfig, params: Params, batch: dict[str, Array]) -> LossSums:
  """Sum the cross-entropy of the tokens under `mask` bool [B, T]; `tokens` and `segment_ids` as in the model."""
  tokens, segment_ids, mask = batch["tokens"], batch["segment_ids"], batch["mask"]
  if tokens.shape[1] <= CHUNK:
    log_probs = sequence_log_probs(config, params, tokens, segment_ids)
    total = jnp.sum(jnp.where(mask, log_probs, 0))
  else:
    total = _sum_of_log_probs(config, params, tokens, segment_ids, mask)
  return LossSums(-total, jnp.sum(mask), {})


def _sum_of_log_probs(config: ModelConfig, params: Params, tokens: Array, segment_ids: Array, mask: Array) -> Array:
  """Sum the log-probabilities of the tokens under `mask`, with logits for little more than these.

  Each row is ordered with its masked tokens first; as many columns are computed, up to a power of two, as the row with
  the most of them has. In fine-tuning on answers, nearly all of a row are documents, and the head of a small model is a
  fifth of its work.
  """
  lm = LM(config)
  following = lambda x: jnp.pad(x[:, 1:], ((0, 0), (0, 1)))

  def of_tokens(head: Params, hidden: Array, targets: Array, asked: Array) -> Array:
    time = targets.shape[1]
    order = jnp.argsort(~asked, axis=1, stable=True)
    asked = jnp.take_along_axis(asked, order, axis=1)
    widths = [FEWEST << i for i in range((time - 1).bit_length()) if FEWEST << i < time]

    @jax.checkpoint
    def of_columns(order: Array, asked: Array) -> Array:
      states = jnp.take_along_axis(hidden, order[:, :, None], axis=1)
      logits: Any = lm.apply(head, states, method="logits")
      log_probs = token_log_probs(logits, jnp.take_along_axis(targets, order, axis=1))
      return jnp.sum(jnp.where(asked, log_probs, 0), axis=1)

    def of_first(width: int) -> Array:
      if width <= CHUNK:
        return of_columns(order[:, :width], asked[:, :width])
      by_chunk = lambda x: jnp.moveaxis(jnp.pad(x, ((0, 0), (0, -time % CHUNK))).reshape(len(x), -1, CHUNK), 1, 0)
      chunks = -(-width // CHUNK)
      rows = by_chunk(order)[:chunks], by_chunk(asked)[:chunks]
      return jax.lax.map(lambda rows: of_columns(*rows), rows).sum(axis=0)

    enough = jnp.sum(jnp.asarray(widths) < asked.sum(axis=1).max())
    return jax.lax.switch(enough, [partial(of_first, width) for width in [*widths, time]])[:, None]

  hidden, asked = packed_states(config, params, tokens, segment_ids), mask & follows(segment_ids)
  return on_own_tokens(of_tokens, params, hidden, following(tokens), following(asked)).sum()


def info_nce(
  queries_BxD: Array, chunks_CxD: Array, gold_B: Array, known_BxC: Array, *, temperature: float
) -> tuple[Array, Array]:
  """Contrast the gold chunk of each query with all other chunks (InfoNCE, arXiv 1807.03748), in at least float32.

  `known` bool marks chunks that are not negatives of a query, such as further chunks that its answer needs. Returns the
  loss of each query [B] and whether its gold chunk is the most similar [B].
  """
  dtype = accumulation_dtype(queries_BxD.dtype)
  scores = jnp.einsum("bd,cd->bc", queries_BxD, chunks_CxD, preferred_element_type=dtype) / temperature
  is_gold = jnp.arange(len(chunks_CxD))[None, :] == gold_B[:, None]
  scores = jnp.where(known_BxC & ~is_gold, -jnp.inf, scores)
  gold = jnp.take_along_axis(scores, gold_B[:, None], axis=1)[:, 0]
  return jax.nn.logsumexp(scores, axis=1) - gold, gold >= scores.max(axis=1)


def advantages(rewards_QxR: np.ndarray, kind: Advantage) -> tuple[np.ndarray, np.ndarray]:
  """Compute the advantage of each of the R rollouts of a question; in numpy, since rewards are made on the host.

  Returns advantages [Q, R] and bool [Q]: whether the rollouts of a question differ in reward, so that it teaches
  anything. `mean`: reward minus the group's mean (Dr. GRPO, arXiv 2503.20783); `grpo`: `mean` divided by the group's
  standard deviation (arXiv 2402.03300); `rloo`: reward minus the mean of the other rollouts of the group (arXiv
  2402.14740); `reinforce`: reward minus the batch's mean.
  """
  centred = rewards_QxR - rewards_QxR.mean(axis=1, keepdims=True)
  spread = rewards_QxR.std(axis=1, keepdims=True)
  n = rewards_QxR.shape[1]
  if kind == "mean":
    result = centred
  elif kind == "grpo":
    result = centred / (spread + 1e-6)
  elif kind == "rloo":
    result = centred * n / max(n - 1, 1)
  elif kind == "reinforce":
    result = rewards_QxR - rewards_QxR.mean()
  else:
    raise ValueError(f"advantage {kind!r}; one of mean, grpo, rloo, reinforce")
  # not `spread > 0`: the mean of equal rewards is not always their value to the last bit
  return result, (rewards_QxR != rewards_QxR[:, :1]).any(axis=1)


def policy_loss(
  log_probs_BxT: Array,
  old_log_probs_BxT: Array,
  advantages_BxT: Array,
  mask_BxT: Array,
  *,
  clip_low: float,
  clip_high: float,
  kl_weight: float = 0.0,
  reference_log_probs_BxT: Array | None = None,
  kl_mask_BxT: Array | None = None,
) -> LossSums:
  """Compute the clipped policy loss over the masked tokens, each with the same weight (PPO, arXiv 1707.06347).

  The lower and upper epsilon are separate, as in DAPO (arXiv 2503.14476); `kl_weight` times the low-variance KL to a
  reference (k3) is added, over the tokens of `kl_mask` if it is given. Returns sums of the loss, of `ratio_gap`
  (absolute difference of the log-probabilities), `clipped`, `surprise` (-log p of the sampled token) and `kl`; the
  weight is the number of tokens under either mask. All metrics but `kl` are of the tokens of `mask`.
  """
  total = lambda values: jnp.sum(jnp.where(mask_BxT, values, 0))
  log_ratio = jnp.where(mask_BxT, log_probs_BxT - old_log_probs_BxT, 0)
  ratio = jnp.exp(log_ratio)
  clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
  loss = -total(jnp.minimum(ratio * advantages_BxT, clipped * advantages_BxT))
  tokens = jnp.sum(mask_BxT)
  metrics: dict[str, Array | Mean] = {
    "ratio_gap": Mean(total(jnp.abs(log_ratio)), tokens),
    "clipped": Mean(total((clipped * advantages_BxT < ratio * advantages_BxT).astype(jnp.float32)), tokens),
    "surprise": Mean(-total(log_probs_BxT), tokens),
  }
  if reference_log_probs_BxT is None:
    return LossSums(loss, tokens, metrics)
  pulled = mask_BxT if kl_mask_BxT is None else kl_mask_BxT
  gap = jnp.where(pulled, reference_log_probs_BxT - log_probs_BxT, 0)
  kl = jnp.sum(jnp.where(pulled, jnp.exp(gap) - gap - 1, 0))
  weight = jnp.sum(mask_BxT | pulled)
  return LossSums(loss + kl_weight * kl, weight, {**metrics, "kl": Mean(kl, weight)})
