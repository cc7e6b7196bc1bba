"""One record in, one rendering out: text, JSON. Never measures."""
