"""Wrong configs of REFRAG, which are refused before anything is written or downloaded."""

import jax
import pytest

from configs.refrag import get_config
from selfrag_jax.experiments.refrag import build


def changed(variant, changes):
  config = get_config(variant)
  config.update_from_flattened_dict(changes)
  return config.to_dict()


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"model.n_heads": 0}, "n_heads is 0; it must be at least 1"),
    ({"mesh.fsdp": 0}, "sizes of at least 1"),
    ({"mesh.fsdp": -2}, r"config\.mesh\.fsdp is -2; it must be a whole number, at least -1"),
    ({"seed": -1}, r"config\.seed is -1; it must be a whole number, at least 0"),
    ({"seed": 2**70}, r"config\.seed is 1180591620717411303424; it must be a whole number, at least 0 and at most"),
    ({"data.seed": -1}, r"config\.data\.seed is -1"),
    ({"memory.dtype": "float"}, r"config\.memory\.dtype is 'float'; one of float32, bfloat16, int8"),
    ({"memory.d_embed": 0}, r"memory\.d_embed is 0"),
    ({"memory.fit_scale": True}, r"memory\.fit_scale is for encoder = lm and an encoder as init"),
    ({"memory.words": 0.5}, r"memory\.words counts words beside a language model: set memory\.encoder = lm"),
    ({"memory.words": 1.5}, r"config\.memory\.words is 1\.5"),
    ({"evaluation.periodic": 0}, r"config\.evaluation\.periodic is 0; it must be a whole number, at least 1"),
    ({"data.name": "three_hop"}, r"config\.data\.name is 'three_hop'; one of two_hop, passages"),
    ({"sft_gold.max_tokens": 20}, r"a demonstration of \d+ tokens exceeds sft_gold\.max_tokens = 20"),
    ({"rl.control": "permuted", "rl.questions_per_step": 1}, "questions_per_step >= 2"),
    ({"rollout.sampling.top_k": 5}, "reinforcement needs samples of the whole distribution"),
    ({"rollout.sampling.temperature": 0.0}, "reinforcement needs samples of the whole distribution"),
  ],
)
def test_a_config_that_does_not_fit_is_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    build(changed("transformer", {"mesh.tensor": 8, "model.n_heads": 8, **changes}))


def test_parameters_that_the_mesh_cannot_split_are_named():
  with pytest.raises(ValueError, match=r"in_proj has the shape .* 292 is not divisible by the 8 shards of tensor"):
    build(changed("hybrid", {"mesh.tensor": jax.device_count()}))


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({}, r"--config\.data\.path=FOLDER"),
    ({"data.path": "nowhere", "init": ""}, "tokenizer of a pretrained model"),
    ({"data.path": "nowhere", "init": "nobody/nothing"}, "nowhere"),  # before the hub is asked
  ],
)
def test_the_real_task_needs_its_data(changes, message):
  with pytest.raises((ValueError, FileNotFoundError), match=message):
    build(changed("smollm2_135m", {"evaluation.batch_size": 8, **changes}))
