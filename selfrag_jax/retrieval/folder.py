"""The folder of a knowledge base: the names of its files, and its checking and publishing."""

import re

from selfrag_jax.storage.generation import PublishedFolder

SETTINGS = "retriever.json"
UNFINISHED = ".build"  # the folder, beside the published files, with the blocks of an unfinished build

_FOLDER = PublishedFolder(
  "knowledge base", re.compile(rf"{re.escape(SETTINGS)}|documents-[0-9]+\.array_record"), beside=(UNFINISHED,)
)
check_output, publish, verified = _FOLDER.check_output, _FOLDER.publish, _FOLDER.verified
