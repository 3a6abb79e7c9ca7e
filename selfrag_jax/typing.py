"""Dimension letters and array aliases, in one place.

Shapes are written in docstrings and, where they are not obvious, as a suffix of the name (`scores_BxC`).

  B batch          T tokens        D model width     S cache length     V vocabulary
  H query heads    K key/value heads                 E head width       F MLP width
  L SSD chunk      P SSD head width                  N SSD state width  G SSD groups     W convolution width
  C memory slots   k neighbours    R shards of the memory
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import numpy as np

Array: TypeAlias = jax.Array
ArrayLike: TypeAlias = jax.Array | np.ndarray
PRNGKey: TypeAlias = jax.Array
Params: TypeAlias = Mapping[str, Any]
