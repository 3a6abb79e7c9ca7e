"""The protocol of encoders, which map texts to vectors; importing it imports no JAX."""

import abc
import copy
import os
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from selfrag_jax.ragged import round_up

if TYPE_CHECKING:  # importing them imports JAX
  from selfrag_jax.encoders.batches import Spread
  from selfrag_jax.typing import Array, ArrayLike, Params, PRNGKey

TextFunction = Callable[[Sequence[str]], Any]  # texts -> [N, D]
MINILM = "all-MiniLM-L6-v2"  # the name of the default sentence encoder

# texts that tell tokenizers apart: by cases, accents, numbers and marks, and by how much of a long text they keep
PROBE = ("Zoë's 2nd naïve café — it cost 1,299.50 € in ÅRHUS; 東京 too.", "unbelievably overlong " * 1000)
STEP = 16  # rows are padded to the longest row of their batch, rounded up to a multiple of this


class Encoder(abc.ABC):
  """A function that maps texts to vectors: texts of about the same meaning should have similar vectors.

  An encoder must define `__call__` alone. The other members default to those of a function that is not fitted to
  documents, has no learned parameters, and has no fingerprint.
  """

  name: str = ""  # the name under which a store of critiques keeps the encoder; if empty, the store asks for one
  _constants: Mapping[str, np.ndarray] = MappingProxyType({})

  @abc.abstractmethod
  def __call__(self, texts: Sequence[str]) -> np.ndarray:
    """Embed texts as vectors f32 [N, D]."""

  @property
  def width(self) -> int:
    """D, the width of a vector."""
    return int(np.asarray(self(["width"])).shape[1])

  def fit(self, texts: Sequence[str]) -> None:  # noqa: B027, most encoders are not fitted
    """Compute `constants` from the texts of a corpus."""

  @property
  def constants(self) -> dict[str, np.ndarray]:
    """The arrays that `fit` computes, by name, empty before; a retriever keeps them in its folder."""
    return dict(self._constants)

  @constants.setter
  def constants(self, arrays: Mapping[str, np.ndarray]) -> None:
    self._constants = arrays

  @property
  def learned_params(self) -> "Params":
    """The learned parameters; empty if the settings and `constants` alone determine the vectors."""
    return {}

  @property
  def fingerprint(self) -> str | None:
    """A text of all that the vectors depend on beside `learned_params` and `constants`; None if it is not known."""
    return None

  @property
  def for_queries(self) -> "Encoder":
    """The encoder of queries to the documents that this one embeds: itself, unless queries are embedded otherwise."""
    return self

  @property
  def count_tokens(self) -> Callable[[Sequence[str]], list[int]] | None:
    """A function that counts the tokens of whole texts; None for an encoder without a tokenizer."""
    return None

  def terms(self, text: str) -> AbstractSet[int]:
    """Return the ids of a text's terms if texts without a common term are similar only by chance, else no ids."""
    return frozenset()

  def is_familiar(self, text: str) -> bool:
    """Tell whether a text's vector is meaningful; if not, a retriever compares the text's terms with the documents'."""
    return True


class FunctionEncoder(Encoder):
  """An encoder that wraps a function of texts."""

  def __init__(self, function: TextFunction):
    self.function = function

  def __call__(self, texts: Sequence[str]) -> np.ndarray:
    return self.function(texts)

  def __eq__(self, other: object) -> bool:
    return isinstance(other, FunctionEncoder) and other.function is self.function

  def __hash__(self) -> int:
    return id(self.function)


def as_encoder(encoder: Encoder | TextFunction) -> Encoder:
  """Return an encoder unchanged; wrap any other function of texts in a `FunctionEncoder`."""
  return encoder if isinstance(encoder, Encoder) else FunctionEncoder(encoder)


class TokenEncoder(Encoder):
  """An encoder that splits texts into tokens and maps the tokens to a vector by a pure function, `apply`."""

  params: Any  # a tree of arrays, the first argument of `apply`

  @abc.abstractmethod
  def init(self, key: "PRNGKey") -> Any:
    """Draw parameters; those with logical axes are boxed with the axes' names."""

  @abc.abstractmethod
  def tokens(self, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each text."""

  @abc.abstractmethod
  def apply(self, params: Any, tokens_BxT: "ArrayLike", lengths_B: "ArrayLike") -> "Array":
    """Embed right-padded rows of token ids as unit vectors f32 [B, D]; an empty row gives the zero vector.

    The function is pure: compiled programs trace it, and training differentiates it.
    """

  def fit(self, texts: Sequence[str]) -> None:
    self.fit_tokens(self.tokens(texts))

  def fit_tokens(self, rows: Sequence[Sequence[int]]) -> None:
    """Compute `constants` from the token ids of a corpus."""

  def fit_queries(self, rows: Sequence[Sequence[int]]) -> None:
    """Compute the `constants` of queries from the token ids of some, after those of a corpus."""

  def query_params(self, params: Any) -> Any:
    """Return the parameters with which `apply` embeds queries; a pure function."""
    return params


class TextEncoder(TokenEncoder):
  """An encoder with learned parameters, which can be trained further."""

  config: Any
  max_tokens: int  # longer texts are cut to this many tokens
  _spread: "Spread | None" = None

  @abc.abstractmethod
  def whole_tokens(self, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of whole texts, with nothing cut or added."""

  @abc.abstractmethod
  def check_folder(self, folder: str | os.PathLike) -> None:
    """Raise FileExistsError for a folder that `save` would refuse, and change nothing."""

  @abc.abstractmethod
  def save(self, folder: str | os.PathLike, params: "Params") -> None:
    """Write the encoder with these parameters to a folder that `load_encoder` can read."""

  @property
  def width(self) -> int:
    return self.config.d_model

  @property
  def learned_params(self) -> "Params":
    return self.params

  @property
  def fingerprint(self) -> str:
    """The configuration, and the token ids of `PROBE`, which show how texts become tokens."""
    return f"{self.config} {self.tokens(PROBE)}"

  @property
  def count_tokens(self) -> Callable[[Sequence[str]], list[int]]:
    return lambda texts: [len(ids) for ids in self.whole_tokens(texts)]

  def __call__(self, texts: Sequence[str]) -> np.ndarray:
    """Embed texts in batches of about equal length, on all devices of this host."""
    from selfrag_jax.encoders.batches import Spread, embed_by_length

    if self._spread is None or self._spread.params is not self.params:
      self._spread = Spread(self.apply, self.params)
    return embed_by_length(self.tokens(texts), self._spread, self.width, self._rounded)

  def with_params(self, params: "Params") -> Self:
    """Return a copy of the encoder with other parameters."""
    other = copy.copy(self)
    other.params = params
    return other

  def _rounded(self, length: int) -> int:
    return min(round_up(max(length, 1), STEP), max(self.max_tokens, length))


def computed_in(dtype: str) -> str:
  """Return the dtype that `auto` stands for on the devices in use; return every other name unchanged."""
  from selfrag_jax.mesh import platform

  if dtype != "auto":
    return dtype
  return "float32" if platform() == "cpu" else "bfloat16"
