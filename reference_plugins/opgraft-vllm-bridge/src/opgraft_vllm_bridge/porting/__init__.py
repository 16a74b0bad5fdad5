"""Porting of vLLM's device plugins: what their source becomes, by reading it. Nothing of a plugin is executed."""
