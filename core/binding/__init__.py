"""Bind ops to kernels: start at ``custom_op.py``, then read ``specialisation.py``."""
