"""The backends that search an index, chosen by name: exact or approximate on devices, NumPy or ScaNN on the host."""

from typing import TYPE_CHECKING

from selfrag_jax.memory.backends.device import DeviceBackend
from selfrag_jax.memory.backends.host import NumpyBackend
from selfrag_jax.memory.backends.scann import ScannBackend
from selfrag_jax.memory.index import Backend

if TYPE_CHECKING:
  from jax.sharding import Mesh


def make_backend(name: str, dtype: str = "float32", mesh: "Mesh | None" = None) -> Backend:
  """Return the backend called exact, approx, scann or numpy.

  Raises ValueError for another name, and for a dtype or mesh that the backend does not use.
  """
  if name in ("exact", "approx"):
    return DeviceBackend(name, dtype, mesh)
  if mesh is not None or dtype != "float32":
    raise ValueError(f"backend {name!r} keeps float32 on the host; dtype and mesh belong to 'exact' and 'approx'")
  if name == "scann":
    return ScannBackend()
  if name == "numpy":
    return NumpyBackend()
  raise ValueError(f"unknown backend {name!r}; use exact, approx, scann or numpy")
