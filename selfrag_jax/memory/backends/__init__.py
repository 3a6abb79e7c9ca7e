"""The backends that search an index, chosen by name: exact or approximate on devices, NumPy or ScaNN on the host."""

from typing import TYPE_CHECKING

from selfrag_jax.memory.backends.device import DeviceBackend
from selfrag_jax.memory.backends.host import NumpyBackend
from selfrag_jax.memory.backends.scann import ScannBackend
from selfrag_jax.memory.index import Backend

if TYPE_CHECKING:
  from jax.sharding import Mesh

DTYPES = ("float32", "bfloat16", "int8")


def make_backend(name: str, dtype: str = "float32", mesh: "Mesh | None" = None) -> Backend:
  """Return the backend called exact, approx, scann or numpy.

  Raises ValueError for another name, for another dtype or mesh, and for one that the backend does not use.
  """
  if name in ("exact", "approx"):
    if dtype not in DTYPES:
      raise ValueError(f"dtype = {dtype!r}; use {', '.join(DTYPES)}")
    if mesh is not None and "data" not in getattr(mesh, "axis_names", ()):
      raise ValueError(f"mesh = {mesh!r}; give a jax.sharding.Mesh with an axis 'data'")
    return DeviceBackend(name, dtype, mesh)
  if mesh is not None or dtype != "float32":
    raise ValueError(f"backend {name!r} keeps float32 on the host; dtype and mesh belong to 'exact' and 'approx'")
  if name == "scann":
    return ScannBackend()
  if name == "numpy":
    return NumpyBackend()
  raise ValueError(f"unknown backend {name!r}; use exact, approx, scann or numpy")
