"""The search of a memory of random rows: every dtype finds its rows on any mesh, and the report has its schema."""

import json

import jax
import jsonschema
import numpy as np
import pytest

from configs.search import ROWS, get_config
from selfrag_jax.experiments import search
from selfrag_jax.reports.schema import read_schema


def made(**flags):
  config = get_config()
  config.update_from_flattened_dict({"memory.rows": 5000, "memory.width": 32, "search.repeats": 2} | flags)
  return search.build(config.to_dict())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_queries_find_the_rows_that_they_were_made_of(dtype, tmp_path):
  experiment = made(**{"memory.dtype": dtype, "memory.rows": 5001, "mesh.fsdp": 2})
  report = search.evaluate(experiment, tmp_path)
  assert report == json.loads((tmp_path / "search.json").read_text())
  jsonschema.validate(report, read_schema("search"))
  assert set(report) == search.value_names(experiment)
  assert (report["found"], report["rows"], report["devices"]) == (1.0, 5008, 8)  # whole parts for eight devices
  assert report["bytes"] == 5008 * 32 * np.dtype(dtype).itemsize


def test_what_is_not_found_is_said(tmp_path, monkeypatch):
  monkeypatch.setattr(search, "NOISE", 100.0)
  assert search.evaluate(made(), tmp_path)["found"] < 0.5


def test_a_dry_run_says_what_a_device_holds(capsys):
  search.dry_run(made(**{"memory.rows": 2**20, "memory.dtype": "int8"}))
  assert "search exact" in (said := capsys.readouterr().out)
  per_row = 32 + 4 + 4 + 1  # embedding, scale, norm, valid: what a search reads
  assert f"{2**20 / 8 * per_row / 2**20:.1f}" in said


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    ({"memory.dtype": "int4"}, "memory.dtype"),
    ({"search.k": 0}, "search.k"),
    ({"memory.rows": 0}, "memory.rows"),
    ({"mesh.fsdp": 3}, "8 devices are not divisible by 3"),
  ],
)
def test_a_mistake_is_named(flags, message):
  with pytest.raises(ValueError, match=message):
    made(**flags)


def test_variants_have_their_rows():
  assert {name: get_config(name).memory.rows for name in ROWS} == ROWS
  with pytest.raises(ValueError, match="has the variants here, v5e_10m, v5e_100m, v5e_1b, not '1b'"):
    get_config("1b")
  assert jax.device_count() == 8
