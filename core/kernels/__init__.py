"""Kernels of our own for the ops' functional forms, a family and a way of writing kernels per file."""
