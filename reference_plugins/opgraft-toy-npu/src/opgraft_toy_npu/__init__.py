"""A simulated NPU for opgraft."""
