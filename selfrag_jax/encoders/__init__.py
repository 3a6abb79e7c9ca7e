"""Encoders: functions of texts, or of token ids, to vectors."""
