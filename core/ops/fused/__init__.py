"""Functional forms of several ops at once: with collectives, quantization and rotation."""
