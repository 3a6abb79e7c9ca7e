"""The special tokens, in the order of their ids. They enter a sequence by id only; text that spells one stays text."""

MAX_DOCUMENTS = 16  # documents that one retrieval can mark

SPECIAL_TOKENS: tuple[str, ...] = (
  "<|pad|>",
  "<|bos|>",
  "<|system|>",
  "<|user|>",
  "<|assistant|>",
  "<|end|>",
  "<|search_start|>",
  "<|search_end|>",
  "<|answer_start|>",
  "<|answer_end|>",
  "[RETRIEVAL_START]",
  "[RETRIEVAL_END]",
  *(f"[DOC_{n}]" for n in range(1, MAX_DOCUMENTS + 1)),
  *(f"[/DOC_{n}]" for n in range(1, MAX_DOCUMENTS + 1)),
  "[MEM]",
  "[SEP]",
)
