"""JAX as a device runtime for opgraft."""
