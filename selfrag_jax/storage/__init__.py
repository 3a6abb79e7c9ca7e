"""Files and folders that are whole or absent: atomic writes, hashes, generations, locks. Imports no JAX."""
