"""Package metadata. `pip install -e '.[test]'` installs what the tests need; extras name what only some users need."""

from pathlib import Path

from setuptools import find_packages, setup

# tensorflow-text has no wheel for Windows, scann none for Windows or macOS; nothing in the default run imports either.
NOT_WINDOWS = "platform_system != 'Windows'"
LINUX = "platform_system == 'Linux'"

# jax 0.11 and later need Python 3.12; flax 0.12.8 does not run on them
BEFORE_312, SINCE_312 = "python_version < '3.12'", "python_version >= '3.12'"


def jax(extra: str = "", platform: str = "") -> list[str]:
  """Return the requirements of JAX with an extra such as `[tpu]`, for a platform."""
  also = f" and {platform}" if platform else ""
  return [f"jax{extra}==0.10.2; {BEFORE_312}{also}", f"jax{extra}==0.12.0.1; {SINCE_312}{also}"]


TEXTGRAD = ["graphviz>=0.20,<1", "openai>=1.60,<3"]
SERVE = ["fastapi>=0.115,<1", "llguidance>=1,<2", "prometheus_client>=0.20,<1", "uvicorn>=0.34,<1"]
WEIGHTS = ["gguf>=0.17,<1", "huggingface_hub>=0.34,<2", "tokenizers>=0.21,<1"]

setup(
  name="selfrag_jax",
  version="0.1.0",
  description="Language models that remember: retrieval inside the compiled decode loop, in JAX and Flax",
  long_description=Path("README.md").read_text(encoding="utf-8"),
  long_description_content_type="text/markdown",
  license="Apache-2.0",
  python_requires=">=3.11,<3.14",
  packages=find_packages(include=["selfrag_jax", "selfrag_jax.*"]),
  package_data={
    "selfrag_jax": ["py.typed", "*.pyi", "apps/serve/page/*", "data/*/*", "reports/schemas/*.json"],
    "selfrag_jax.*": ["*.pyi"],
  },
  install_requires=[
    "absl-py~=2.5",
    "array_record>=0.8,<1",
    "bm25s>=0.2.12,<1",
    "datasketch>=1.6,<3",
    "etils[epath]>=1.12",
    f"flax==0.12.8; {BEFORE_312}",
    f"flax==0.12.12; {SINCE_312}",
    "grain==0.2.18",
    *jax(),
    "lazy_loader>=0.4,<1",
    "matplotlib>=3.9,<4",
    "ml_collections~=1.1",
    "numba>=0.61,<1",
    "numpy>=1.26,<3",
    "optax==0.2.8",
    "orbax-checkpoint==0.12.8",
    "PyStemmer>=2.2,<4",
    "safetensors>=0.5,<1",
    "scipy>=1.11,<2",
    "tensorboardX>=2.6,<3",
    "tensorstore>=0.1.84,<0.2",
    "tqdm>=4.66,<5",
    # scann 1.4 loads TensorFlow ops built for 2.20; with 2.21 its import dies with an undefined symbol.
    f"scann~=1.4; {LINUX}",
    f"tensorflow-text~=2.20.0; {NOT_WINDOWS}",
  ],
  extras_require={
    "test": [
      *SERVE,
      *TEXTGRAD,
      *WEIGHTS,
      "axe-playwright-python>=0.1.4,<0.2",  # what the web page lacks for people with disabilities
      "diskcache>=5.6,<6",  # TextGrad's own tests give one as the cache of an engine
      "hypothesis>=6.100,<7",
      "ipykernel>=6.29,<8",
      "jinja2>=3.1,<4",
      "jsonschema>=4.18,<5",
      "import-linter>=2.3,<3",
      "lm_eval[hf]>=0.4.13,<0.5",  # with peft, an oracle as well
      "nbclient>=0.10,<1",
      "pexpect>=4.9,<5",
      "schemathesis>=4,<5",  # bodies made from the document of the server
      "playwright>=1.49,<2",  # drives the system's Chromium; brings no browser of its own
      "pyright>=1.1.400,<2",
      "pytest>=8,<10",
      "pytest-xdist>=3.6,<4",
      "ruff>=0.12,<1",
      "trustme>=1.2,<2",  # certificates of the local server that stands in for object storage
      # the TPU compiler: programs are compiled ahead of time for a TPU that is not there
      *jax("[tpu]", LINUX),
      # oracles: the reference implementations our model is held against
      "pytrec-eval-terrier>=0.5,<1",
      "scikit-learn>=1.5,<2",
      "sentence-transformers>=5,<7",
      "sentencepiece>=0.2,<1",
      "torch==2.13.0",
      "transformers>=5,<6",
    ],
    "weights": WEIGHTS,
    "serve": [*SERVE, *WEIGHTS],
    "textgrad": TEXTGRAD,
    "harness": ["lm_eval>=0.4.13,<0.5"],
    "parquet": ["pyarrow>=17,<27"],
    "litellm": ["litellm>=1.49,<2"],  # get_engine("experimental:...") for providers that do not speak OpenAI's protocol
    "tpu": jax("[tpu]"),
    "cuda": jax("[cuda12]"),
    "peers": ["faiss-cpu>=1.11,<2", "sentence-transformers>=5,<7"],
  },
  classifiers=[
    "Programming Language :: Python :: 3.11",
    "Programming Language :: Python :: 3.12",
    "Programming Language :: Python :: 3.13",
  ],
)
