"""Drafts of the next tokens, without a model, and the choice of how many to verify."""
