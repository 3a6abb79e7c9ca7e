"""Archives of NumPy arrays (`.npz`), without pickles."""

import io
import zipfile
import zlib
from collections.abc import Mapping

import numpy as np
from etils import epath

from selfrag_jax.storage.binary import open_binary

# the errors of NumPy and zipfile for bytes that are no archive, and for archives of something else than arrays
_NO_ARRAYS = (
  AttributeError, EOFError, LookupError, RuntimeError, TypeError, ValueError, zipfile.BadZipFile, zlib.error
)  # fmt: skip


def npz_bytes(arrays: Mapping[str, np.ndarray]) -> bytes:
  """Return arrays as the bytes of an `.npz` file. Raises ValueError for arrays of Python objects."""
  buffer = io.BytesIO()
  np.savez(buffer, allow_pickle=False, **arrays)
  return buffer.getvalue()


def read_npz(source: epath.PathLike | bytes) -> dict[str, np.ndarray]:
  """Return the arrays of a file, or of its bytes, by name. Raises ValueError for anything but an archive of arrays."""
  with io.BytesIO(source) if isinstance(source, bytes) else open_binary(source) as file:
    try:
      with np.load(file, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}
    except _NO_ARRAYS as error:
      raise ValueError(f"it is no archive of arrays ({error!r})") from None
