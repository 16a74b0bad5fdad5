"""The proof that each op carries: one ``OpSpec`` per functional form, a family per file."""
