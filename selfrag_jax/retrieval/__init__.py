"""Retrievers over documents, and the knowledge bases that they are built from."""
