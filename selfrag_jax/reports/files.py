"""The files of a report."""

import jax
from etils import epath

from selfrag_jax.storage.atomic import write_bytes_atomic


def write_file(path: epath.PathLike, data: bytes) -> None:
  """Write a file atomically. Of several processes, which all make the same report, the first writes it."""
  if jax.process_index() == 0:
    write_bytes_atomic(path, data)
