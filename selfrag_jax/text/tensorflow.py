"""TensorFlow, for the tokenizers that need it."""

from typing import Any


def tensorflow() -> tuple[Any, Any]:
  """Import TensorFlow and tensorflow-text, which takes seconds; the accelerators are left to JAX."""
  import tensorflow as tf
  import tensorflow_text as tf_text

  tf.config.set_visible_devices([], "GPU")
  return tf, tf_text
