"""The memory: a ring of embeddings, the top-k over it and the default encoder."""
