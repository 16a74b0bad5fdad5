"""Norms and gated activations whose result is quantised: functional forms of other ops."""
