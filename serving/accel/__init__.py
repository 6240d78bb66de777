"""Sparse prefill inside vLLM: an attention backend that reads fewer pages of the cache (README.md has the method)."""
