"""Forms of norms and gated activations with a quantised result."""
