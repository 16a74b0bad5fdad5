"""Attention whose result is quantised: a functional form of the attention op."""
