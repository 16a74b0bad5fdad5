"""``PackedLinear``, what a ``Linear`` op is while its weight is packed."""

from __future__ import annotations

from typing import ClassVar

from opgraft.ops.linear.modules import Linear
from opgraft.ops.linear.packable import PackableLayer


class PackedLinear(PackableLayer, Linear):
    """A linear layer that holds its weight packed, and not as a parameter.

    ``pack`` makes it of a ``Linear`` in place, and ``unpack`` makes it one again. What oneDNN cannot pack, as after
    ``.half()`` or on another device, is an ordinary parameter until ``.to()``, ``load_state_dict`` or ``pack`` makes it
    something that oneDNN can. So is what is assigned, by ``load_state_dict`` with ``assign=True`` too, until the next
    ``pack``, which sees whom it shares memory with.
    """

    packs_always: ClassVar[bool] = True

    def hold_packed(self) -> None:
        """Hold the weight packed only, where that can be and nobody trains it."""
        if not self.training:
            super().hold_packed()

    def process_weights_after_loading(self) -> None:
        """Hold the weight packed only: whoever made the layer one of this class has decided that."""
        self.hold_packed()
