"""The plugin's hooks, for the TPU platform only."""

from __future__ import annotations

import importlib

import opgraft

platforms = ("tpu",)


@opgraft.hookimpl
def opgraft_register_ops() -> None:
    """Import the replacement, which registers it; torch_xla and jax are imported with it."""
    importlib.import_module("opgraft_pallas.op")
