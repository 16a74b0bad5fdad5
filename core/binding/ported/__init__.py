"""Modules under the names in vLLM: ``opgraft.logger`` is ``logger.py`` here."""
