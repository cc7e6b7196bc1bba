"""kvgen: text generation on a hand-written KV cache, with what the cache buys made visible."""

__version__ = "0.1.0"
