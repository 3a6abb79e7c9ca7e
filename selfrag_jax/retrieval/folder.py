"""The folder of a knowledge base: which files make it one, and what else may lie in it."""

import re

from selfrag_jax.storage.generation import PublishedFolder

SETTINGS = "retriever.json"
UNFINISHED = ".build"  # beside the published files: the blocks of a build that has not ended

_FOLDER = PublishedFolder(
  "knowledge base", re.compile(rf"{re.escape(SETTINGS)}|documents-[0-9]+\.array_record"), beside=(UNFINISHED,)
)
check_output, publish, verified = _FOLDER.check_output, _FOLDER.publish, _FOLDER.verified
