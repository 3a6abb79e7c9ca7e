"""Text in, token ids out: tokenizers, special tokens and the rendering of conversations."""
