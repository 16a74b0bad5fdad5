"""Models: how they are constructed."""
