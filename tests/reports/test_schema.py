"""The schemas of the reports: every report fits its schema; one top-level key more or less does not."""

import json
from pathlib import Path

import jsonschema
import pytest

from selfrag_jax.experiments.base import NAMES
from selfrag_jax.reports.schema import read_schema

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
REPORTS = {
  "documents": ["documents_*.json"],
  "encoder": ["encoder_*.json"],
  "position_recall": ["position_recall_*.json", "headlines/*/*/position_recall.json"],
  "refrag": ["refrag_hybrid_*.json", "refrag_mamba_*.json", "refrag_smollm2_*.json", "headlines/*/*/report.json"],
  "rerank": ["rerank_*.json", "headlines/*/*/rerank.json"],
  "sweep": ["headlines/sweep.json"],
}
FOUND = [(name, path) for name, globs in REPORTS.items() for glob in globs for path in sorted(RESULTS.glob(glob))]


@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_has_a_schema(name):
  jsonschema.Draft202012Validator.check_schema(read_schema(name))


@pytest.mark.parametrize(("name", "path"), FOUND, ids=[str(path.relative_to(RESULTS)) for _, path in FOUND])
def test_the_reports_of_the_results_keep_their_schema(name, path):
  jsonschema.validate(json.loads(path.read_text()), read_schema(name))


@pytest.mark.parametrize("name", sorted(REPORTS.keys() - {"sweep"}))  # whose keys are the names of groups
def test_a_key_too_many_or_too_few_is_refused(name):
  [path, *_] = [path for of, path in FOUND if of == name]
  report, schema = json.loads(path.read_text()), read_schema(name)
  for key in report:
    with pytest.raises(jsonschema.ValidationError):
      jsonschema.validate({other: value for other, value in report.items() if other != key}, schema)
  with pytest.raises(jsonschema.ValidationError):
    jsonschema.validate({**report, "extra": 1}, schema)


@pytest.mark.parametrize("key", ["runs", "values", "checks"])
def test_a_group_of_a_sweep_has_its_keys(key):
  report = json.loads((RESULTS / "headlines" / "sweep.json").read_text())
  group = next(iter(report))
  del report[group][key]
  with pytest.raises(jsonschema.ValidationError, match=key):
    jsonschema.validate(report, read_schema("sweep"))
