"""Storage in files and folders that are either whole or absent: atomic writes, hashes, generations, locks; no JAX."""

import os

# TensorFlow, by which epath reads object storage, would tell for 5 seconds that a deleted folder is still there
os.environ.setdefault("GCS_STAT_CACHE_MAX_AGE", "0")
