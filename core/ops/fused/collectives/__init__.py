"""Forms of norms and linear maps together with collectives of a group of ranks."""
