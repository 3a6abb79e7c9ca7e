"""The JSON schemas of the reports: one file for each experiment, under its name."""

import json
from importlib import resources
from typing import Any


def read_schema(experiment: str) -> dict[str, Any]:
  """Return the JSON schema (draft 2020-12) of an experiment's report. Raises FileNotFoundError for an unknown one."""
  folder = resources.files("selfrag_jax.reports") / "schemas"
  return json.loads((folder / f"{experiment}.json").read_text(encoding="utf-8"))
