"""Mixtures of experts: the choice of experts, their layers, and layers whose weights are quantized."""
