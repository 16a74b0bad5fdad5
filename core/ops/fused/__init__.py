"""Functional forms that compute several ops at once: with collectives, with quantization, with rotation."""
