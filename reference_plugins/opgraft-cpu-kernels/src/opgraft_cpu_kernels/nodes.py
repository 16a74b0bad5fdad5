"""The attention layers that compiled graphs have as nodes, by an op of the library that finds them without Python."""

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
    """Hands pages and settings of layers to the library where they have changed, and the batch in each call."""

    _held: Any = None
    _pages: object = None
    """Of the batch whose tensors the library holds."""
    _next_hook = 0

    @property
    def op(self) -> Any:
        return _attend_layer

    @contextmanager
    def entered(self) -> Iterator[None]:
        batch = current_batch()
        with super().entered():
            if (
                batch is None
                or watched()
                or hooks_on_every_module()
                or batch.block_size % attention.GROUP
            ):
                yield
                return
            held = self._of(batch)
            held.enter(batch.query_start_loc, batch.seq_lens)
            try:
                yield
            finally:
                held.leave()

    def _of(self, batch: AttentionBatch) -> Any:
        """Return the library's layers, bound anew where something has changed."""
        # Hooks are numbered: the next number tells of new ones.
        seen = (
            batch.continues
            and self._next_hook == RemovableHandle.next_id
            and self._pages is batch.pages
        )
        if not seen:
            self._held = torch.classes.opgraft_cpu_kernels.AttentionNodes()
            for prefix, layer in self.layers.items():
                pages = batch.pages.get(prefix)
                if (
                    pages is not None
                    and not no_attention(layer)
                    and not any(vars(layer)[name] for name in HOOKS)
                ):
                    self._add(prefix, layer, pages)
            self._pages, self._next_hook = batch.pages, RemovableHandle.next_id
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


_attend_layer = op("attend_layer")
