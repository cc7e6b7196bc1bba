"""Prefill, decode, sampling, stop rules and incremental text. Knows nothing of who prints."""
