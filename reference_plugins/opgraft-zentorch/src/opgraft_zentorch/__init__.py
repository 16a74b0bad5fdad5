"""Kernels of AMD's zentorch, for opgraft."""
