"""The attention layers of compiled graphs, by an op of the library that needs no Python.

A compiled graph calls each attention layer as a node with the layer's name. The library keeps
settings and pages by these names.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from opgraft.kernels import AttentionNodes as Base
from opgraft.kernels import hooks_on_every_module, watched
from opgraft.ops import AttentionBatch, LayerPages, current_batch
from torch.utils.hooks import RemovableHandle

from opgraft_cpu_kernels import attention
from opgraft_cpu_kernels.decoder import HOOKS, no_attention
from opgraft_cpu_kernels.kernels import op


class AttentionNodes(Base):
    """Gives the library the batch of each call, and pages and settings if they have changed."""

    _held: Any = None
    """The library's table of layers."""

    _pages: object = None
    """The pages whose tensors the table has."""

    _next_hook = 0
    """torch's number of the next hook, when the table was made."""

    @property
    def op(self) -> Any:
        """Return the op that compiled graphs call."""
        return _attend_layer

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Let the library compute the layers in this block, if it can."""
        batch = current_batch()
        with super().entered():
            if batch is None or not _can_hold(batch):
                yield
                return
            held = self._table_for(batch)
            held.enter(batch.query_start_loc, batch.seq_lens)
            try:
                yield
            finally:
                held.leave()

    def _table_for(self, batch: AttentionBatch) -> Any:
        """Return the library's table of layers, made again if something has changed."""
        # torch numbers hooks. If the next number is the same, no hook was added.
        same_hooks = self._next_hook == RemovableHandle.next_id
        if batch.continues and same_hooks and self._pages is batch.pages:
            return self._held
        self._held = torch.classes.opgraft_cpu_kernels.AttentionNodes()
        for prefix, layer in self.layers.items():
            pages = batch.pages.get(prefix)
            if pages is not None and _takes(layer):
                self._add(prefix, layer, pages)
        self._pages = batch.pages
        self._next_hook = RemovableHandle.next_id
        return self._held

    def _add(self, prefix: str, layer: Any, pages: LayerPages) -> None:
        settings = (
            layer.head_size,
            layer.scale,
            layer.sliding_window,
            layer.logits_soft_cap,
            layer.sinks,
        )
        self._held.add_layer(prefix, *settings, pages.cache, pages.slots, pages.block_table)


def _can_hold(batch: AttentionBatch) -> bool:
    """Return True unless something observes single calls, or the blocks have another layout."""
    return not watched() and not hooks_on_every_module() and batch.block_size % attention.GROUP == 0


def _takes(layer: Any) -> bool:
    """Return True if the library computes the layer: unchanged, and without hooks."""
    if no_attention(layer):
        return False
    return not any(vars(layer)[name] for name in HOOKS)


_attend_layer = op("attend_layer")
