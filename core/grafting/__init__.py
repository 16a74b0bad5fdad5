"""Grafting: replacing the modules of an existing model by ops, in place, and taking it back."""

from opgraft.grafting.replace import graft, ungraft
from opgraft.grafting.report import GraftReport

__all__ = ["GraftReport", "graft", "ungraft"]
