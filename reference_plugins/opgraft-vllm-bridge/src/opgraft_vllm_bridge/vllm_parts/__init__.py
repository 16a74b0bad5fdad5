"""Modules of vLLM with names that opgraft has in another form."""
