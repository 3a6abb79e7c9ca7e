"""Storage in files and folders that are either whole or absent: atomic writes, hashes, generations, locks; no JAX."""
