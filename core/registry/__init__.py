"""Declarations of ops and replacements, and the choice between replacements."""
