"""The plugin's hooks, for the TPU platform only."""

from __future__ import annotations

import importlib
import sys

import opgraft

platforms = ("tpu",)


@opgraft.hookimpl
def opgraft_register_ops() -> None:
    """Import the replacement, which registers it; torch_xla and jax are imported with it."""
    before = [*sys.meta_path]
    importlib.import_module("opgraft_pallas.op")
    # absl, which jax imports, puts a finder before the last one. New finders belong behind all.
    added = [finder for finder in sys.meta_path if finder not in before]
    sys.meta_path[:] = [*before, *added]
