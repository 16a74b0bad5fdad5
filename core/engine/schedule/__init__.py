"""The schedule: which tokens of which requests a step computes, and in which blocks of the cache."""
