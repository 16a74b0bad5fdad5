"""The machine as probes see it."""
