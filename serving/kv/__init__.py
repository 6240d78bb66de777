"""A tier on disk below the engine's KV cache: prompt prefixes that were read once outlive eviction and restarts."""
