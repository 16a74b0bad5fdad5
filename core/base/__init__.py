"""Small helpers without devices or ops: text, files, caches, progress, installed distributions."""
