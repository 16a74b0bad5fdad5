"""Kernels of Intel's extension for PyTorch, for opgraft."""
