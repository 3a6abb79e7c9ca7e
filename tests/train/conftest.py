"""A run of the loop that nothing has stopped."""

import pytest

from selfrag_jax.train.loop import train
from tests.train.walk import METADATA, Walk, config, rows


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("uninterrupted")
  return train(Walk(), workdir, config(), METADATA), rows(workdir)
