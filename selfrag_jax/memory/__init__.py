"""The memory: a ring of embeddings, the top-k over it, the default encoder and its host face."""
