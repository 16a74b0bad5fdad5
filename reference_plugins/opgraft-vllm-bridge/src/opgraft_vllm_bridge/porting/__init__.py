"""Port a vLLM plugin's source to opgraft. The source is read and rewritten, and never executed."""
