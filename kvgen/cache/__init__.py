"""What a KV cache is here: layer specs, buffers, the manager and the transformers adapter."""
