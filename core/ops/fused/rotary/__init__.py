"""Norms of the heads of query and key with their rotation: a functional form of the rotary embedding."""
