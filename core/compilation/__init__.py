"""Compilation: a graph of semantic ops, passes over it, and kernels or code for what is in it."""
