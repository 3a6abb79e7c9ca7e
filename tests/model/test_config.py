"""Model configs: a wrong one is an error at once, which names field and value; so is an unknown field of a file."""

import dataclasses
import json

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selfrag_jax.model.config import MAX_LAYERS, ModelConfig, count_params, identity, unfit
from selfrag_jax.model.pretrained import read_config, read_fields

LLAMA = {
  "model_type": "llama", "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
  "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 40, "rope_theta": 500.0, "rms_norm_eps": 1e-4,
  "tie_word_embeddings": False, "hidden_act": "silu", "rope_parameters": {"rope_type": "default"},
}  # fmt: skip
MAMBA = {
  "model_type": "mamba2", "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "expand": 2, "state_size": 4,
  "head_dim": 8, "num_heads": 8, "n_groups": 1, "conv_kernel": 4, "chunk_size": 8, "layer_norm_epsilon": 1e-5,
}  # fmt: skip
JSON = st.recursive(
  st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.integers(-(10**25), 10**25),
  lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
  max_leaves=5,
)


@pytest.mark.parametrize(
  ("field", "value"),
  [
    *[("vocab_size", value) for value in (10**12, 0, -1, "61", 61.0, True, None, [61])],
    *[("d_model", 10**9), ("d_model", 10**30), ("head_dim", 0), ("n_heads", -4), ("mlp_dim", 2.5)],
    *[("n_layers", value) for value in (10**9, 0, "2")],
    *[("norm_eps", value) for value in (float("nan"), float("inf"), 0, -1e-5, "1e-5", None)],
    *[("rope_base", value) for value in (0, -1.0, float("nan"), 1e300, True, "1e4")],
    *[("init_scale", value) for value in (-0.02, float("nan"), float("inf"))],
    *[("window", 0), ("ssm_chunk", 0), ("ssm_state", -1), ("ssm_conv", 1.0), ("logit_softcap", 0.0)],
    *[("attention_softcap", -1), ("tie_embeddings", "yes"), ("qk_norm", 1), ("rope", None), ("tie_embeddings", None)],
    *[("mlp", "gelu"), ("mlp", ["swiglu"]), ("dtype", 32), ("remat", None)],
  ],
)
def test_a_value_that_no_model_has_is_named_when_the_config_is_made(field, value):
  with pytest.raises(ValueError, match=rf"^(block_pattern|vocab_size .*d_model|{field}) "):
    ModelConfig(**{"vocab_size": 61, "d_model": 32, "n_layers": 2, "n_heads": 4, field: value})


@pytest.mark.parametrize("field", ["dtype", "param_dtype"])
def test_float64_is_not_float32_by_another_name(field):
  with pytest.raises(ValueError, match="float64, which JAX has switched off: set JAX_ENABLE_X64=1"):
    ModelConfig(61, **{field: "float64"})
  with jax.enable_x64():
    assert getattr(ModelConfig(61, **{field: "float64"}), field) == "float64"


@pytest.mark.parametrize("pattern", ["T*1000000000", "T*99999999999999999999", "M*²", 7, [["T"], "T"], {"T": 1}])
def test_patterns_that_are_none_are_named_before_they_are_made(pattern):
  with pytest.raises(ValueError, match=r"^block_pattern "):
    ModelConfig(61, d_model=32, n_layers=2, block_pattern=pattern)


def test_sizes_that_are_fine_alone_may_be_too_many_parameters():
  with pytest.raises(ValueError, match=r"d_model 10000000, .* make \d\.\de\+1\d parameters, at most 1\.1e\+12"):
    ModelConfig(61, d_model=10_000_000, n_layers=MAX_LAYERS, n_heads=100_000)
  large = ModelConfig(128_256, d_model=16_384, n_layers=126, n_heads=128, n_kv_heads=8, mlp_dim=53_248)
  assert 4e11 < count_params(large)["total"] < 4.2e11  # Llama 3.1 405B is no mistake


def test_sizes_of_blocks_that_a_model_does_not_have_need_not_fit():
  assert ModelConfig(61, d_model=8, n_layers=1, n_heads=2).head_dim == 4  # no whole SSM head
  assert ModelConfig(61, d_model=36, n_layers=1, block_pattern="M", ssm_head_dim=8).ssm_heads == 9  # 8 heads of 4.5
  with pytest.raises(ValueError, match="is not divisible by ssm_head_dim 32"):
    ModelConfig(61, d_model=8, n_layers=2, n_heads=2, block_pattern="TM")


@pytest.mark.parametrize("options", [{"block_pattern": "TT"}, {"block_pattern": "LT", "window": 4, "rope": False}])
def test_rotary_embedding_is_left_to_layers_of_a_window_where_there_are_some_that_have_it(options):
  with pytest.raises(ValueError, match="full_rope is False: it leaves rotary embedding to L layers alone"):
    ModelConfig(61, d_model=32, n_layers=2, n_heads=2, full_rope=False, **options)
  kept = ModelConfig(61, d_model=32, n_layers=2, n_heads=2, full_rope=False, block_pattern="LT", window=4)
  assert [layer.rope_base for layer in kept.layers] == [10_000.0, None]


def test_integers_may_stand_for_numbers():
  assert unfit("rope_base", 10_000) is None
  assert ModelConfig(61, d_model=32, n_layers=1, rope_base=10_000).rope_base == 10_000


def write(folder, fields):
  (folder / "config.json").write_text(json.dumps(fields))
  return folder / "config.json"


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    (LLAMA | {"hidden_size": "32"}, "hidden_size is '32'; it must be a whole number"),
    (LLAMA | {"hidden_size": 32.0}, "hidden_size is 32.0; it must be a whole number"),
    (LLAMA | {"hidden_size": None}, "hidden_size is None; it must be a whole number"),
    (LLAMA | {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; it must be at most 1024"),
    (LLAMA | {"vocab_size": 10**12}, "vocab_size is 1000000000000; it must be at most 2147483647"),
    (LLAMA | {"head_dim": 0}, "head_dim is 0; it must be at least 1"),
    (LLAMA | {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; it must be a number from"),
    (LLAMA | {"rope_theta": -1}, "rope_theta is -1; it must be a number from"),
    (LLAMA | {"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'; it must be true or false"),
    (LLAMA | {"num_key_value_heads": 3}, "n_heads 4 is not divisible by n_kv_heads 3"),
    (LLAMA | {"model_type": ["llama"]}, "model_type is .'llama'.; implemented are llama, mamba2"),
    (LLAMA | {"model_type": None}, "model_type is None; implemented are llama, mamba2"),
    (LLAMA | {"rope_parameters": [1]}, "rope_parameters is .1.; it must be one object"),
    (LLAMA | {"rope_parameters": {"full": {"rope_theta": 9.0}}}, "rope_parameters is .*; it must be one object"),
    (MAMBA | {"num_heads": "8"}, "num_heads is '8'; it must be a whole number"),
    ({"model_type": "llama"}, "has no hidden_size"),
  ],
)
def test_a_field_of_the_wrong_kind_is_named_with_the_file(tmp_path, fields, message):
  path = write(tmp_path, fields)
  with pytest.raises(ValueError, match=rf"config\.json:? .*{message}"):
    read_config(path, *read_fields(path), "float32")


@settings(max_examples=300, deadline=None)
@given(
  base=st.sampled_from([LLAMA, MAMBA]),
  changes=st.dictionaries(st.sampled_from(sorted(LLAMA.keys() | MAMBA.keys())), JSON, max_size=3),
  other=st.none() | JSON,
)
def test_any_config_is_a_model_or_an_error_with_the_file(tmp_path_factory, base, changes, other):
  path = write(tmp_path_factory.getbasetemp(), other if other is not None else base | changes)
  try:
    found = isinstance(read_config(path, *read_fields(path), "float32"), ModelConfig)
  except ValueError as error:
    found = "config.json" in str(error)
  assert found


def test_a_model_is_the_same_where_it_was_stored_before_a_field_was_there_or_is_computed_in_another_way():
  model = ModelConfig(vocab_size=8, d_model=8, n_layers=1, n_heads=1)
  stored = model.to_dict()
  del stored["rope"]
  assert identity(stored) == identity(dataclasses.replace(model, remat="full", kernels="xla").to_dict())
  assert identity(stored) != identity(dataclasses.replace(model, rope=False).to_dict())
