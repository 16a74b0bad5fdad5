"""Device plugins that were written for vLLM, run by opgraft as they are."""
