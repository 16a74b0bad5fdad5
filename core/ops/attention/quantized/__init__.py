"""Attention with a quantised result: a functional form of the attention op."""
