"""Modules under the names in vLLM. ``opgraft`` has this folder on its path, so that
``opgraft.logger`` is ``logger.py`` here. Ported plugins import these modules.
"""
