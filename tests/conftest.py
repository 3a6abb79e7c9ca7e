"""Eight virtual CPU devices and strict numerics for every test; a persistent compilation cache for repeated runs."""

import gc
import os
import tempfile
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# tests compile more than they compute: without LLVM's optimisations, and without the emitters that lower fusions by way
# of MLIR, which JAX 0.12 can no longer do without, a program compiles in a third of the time
os.environ["XLA_FLAGS"] = " ".join(
  [
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0",
    *(["--xla_cpu_use_fusion_emitters=false"] if version("jaxlib").startswith("0.10.") else []),
    os.environ.get("XLA_FLAGS", ""),
  ]
).strip()

# the launchers that tests start share it; JAX reads these when it is imported
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(tempfile.gettempdir()) / "selfrag_jax_test_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")

import jax
import pytest

from selfrag_jax.mesh import configure_xla

configure_xla()
jax.config.update("jax_numpy_rank_promotion", "raise")


MOST_MAPS = 20_000  # a process may have 65,530 memory maps; a compiled program holds several as long as JAX keeps it


@pytest.fixture(scope="module", autouse=True)
def few_programs():
  """Let go of the compiled programs of earlier modules once there are many."""
  yield
  maps = Path("/proc/self/maps")
  if maps.exists() and len(maps.read_bytes().splitlines()) > MOST_MAPS:
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="session")
def shared_data() -> Path:
  """The folder of small real data sets; tests that need it skip where it is absent."""
  folder = Path(os.environ.get("SELFRAG_JAX_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
  if not folder.is_dir():
    pytest.skip(f"no data folder at {folder}; set SELFRAG_JAX_DATA")
  return folder
