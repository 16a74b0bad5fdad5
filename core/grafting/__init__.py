"""Grafting: ops take the place of modules in a model, and ungrafting puts the modules back."""

from opgraft.grafting.replace import graft, ungraft
from opgraft.grafting.report import GraftReport

__all__ = ["GraftReport", "graft", "ungraft"]
