"""The plugin's hooks, for the TPU platform only."""

from __future__ import annotations

import importlib
import sys

import opgraft

platforms = ("tpu",)


@opgraft.hookimpl
def opgraft_register_ops() -> None:
    """Import the replacements. The import registers them, and imports torch_xla and jax."""
    before = [*sys.meta_path]
    try:
        importlib.import_module("opgraft_pallas.op")
    finally:
        # jax imports absl, and absl puts a finder before the last one. New finders belong at
        # the end.
        kept = [finder for finder in before if finder in sys.meta_path]
        added = [finder for finder in sys.meta_path if finder not in before]
        sys.meta_path[:] = [*kept, *added]
