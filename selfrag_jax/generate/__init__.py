"""Decoding: sampling, and rollouts whose retrieval is part of the compiled program."""

from typing import TYPE_CHECKING

from selfrag_jax.lazy import lazy_names

if TYPE_CHECKING:
  from selfrag_jax.generate.retrieve import make_retrieve as make_retrieve
  from selfrag_jax.generate.rollout import ControlTokens as ControlTokens
  from selfrag_jax.generate.rollout import Rollout as Rollout
  from selfrag_jax.generate.rollout import RolloutConfig as RolloutConfig
  from selfrag_jax.generate.rollout import control_tokens as control_tokens
  from selfrag_jax.generate.rollout import rollout_on_host as rollout_on_host
  from selfrag_jax.generate.sampling import SamplingConfig as SamplingConfig
  from selfrag_jax.generate.sampling import sample as sample
  from selfrag_jax.generate.sampling import token_log_probs as token_log_probs
  from selfrag_jax.generate.transcript import Transcript as Transcript
  from selfrag_jax.generate.transcript import read_transcripts as read_transcripts
else:
  __getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
      "retrieve": ["make_retrieve"],
      "rollout": ["ControlTokens", "Rollout", "RolloutConfig", "control_tokens", "rollout_on_host"],
      "sampling": ["SamplingConfig", "sample", "token_log_probs"],
      "transcript": ["Transcript", "read_transcripts"],
    },
  )
