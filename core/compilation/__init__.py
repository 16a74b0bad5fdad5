"""Compilation: capture a graph of semantic ops, run passes, lower to kernels, generate code."""
