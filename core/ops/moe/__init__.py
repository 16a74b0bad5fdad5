"""Mixtures of experts: routing, layers of experts, and layers with quantized experts."""
