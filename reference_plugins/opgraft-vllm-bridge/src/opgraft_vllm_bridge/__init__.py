"""Run device plugins of vLLM on opgraft, without a change."""
