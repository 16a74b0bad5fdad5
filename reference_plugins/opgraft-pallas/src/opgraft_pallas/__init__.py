"""Attention in Pallas for the TPU platform of opgraft."""
