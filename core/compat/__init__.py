"""Private names of torch, which occur nowhere else: each with its reason, and the fallback where it is missing."""
