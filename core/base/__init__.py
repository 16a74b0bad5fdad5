"""Small helpers that know nothing of devices or ops: text, files, caches, progress, installed distributions."""
