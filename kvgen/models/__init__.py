"""From a name to files to a loaded model and tokenizer. Knows nothing of caching policy."""
