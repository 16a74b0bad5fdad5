"""The schedule: the tokens of each step, and blocks of the cache for them."""
