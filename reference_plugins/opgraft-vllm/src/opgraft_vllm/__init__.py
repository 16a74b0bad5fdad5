"""opgraft's kernels in vLLM."""
