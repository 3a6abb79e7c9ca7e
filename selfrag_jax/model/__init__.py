"""The language model: a hybrid of attention and Mamba-2 layers with one cache entry point."""
