"""Codes of weights with scales, from formats of checkpoints, and their storage in layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from opgraft.ops.linear.quantized.storage import MIDDLE, pack_int4
from torch import Tensor


@dataclass(frozen=True)
class Codes:
    """Some rows of a weight: ``code · scale + offset`` by group of inputs.

    Attributes:
        codes: ``[rows, in_features]``, in ``int8``, or from 0 to 15 in ``uint8``.
        scales: ``[rows, groups]`` in a floating-point dtype.
        offsets: ``[rows, groups]``. Without offsets, codes in ``uint8`` stand for ``(code - 8) ·
            scale``.
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None = None

    @property
    def is_packed(self) -> bool:
        """True if the codes have four bits."""
        return self.codes.dtype == torch.uint8

    def widened(self) -> Codes:
        """Return the same weight with codes in ``int8``."""
        if not self.is_packed:
            return self
        # With offsets, codes from 0 to 15 stand for themselves.
        middle = MIDDLE if self.offsets is None else 0
        return Codes(self.codes.to(torch.int8) - middle, self.scales, self.offsets)

    def shifted(self) -> Codes:
        """Return the same weight with offsets."""
        if self.offsets is not None:
            return self
        middle = MIDDLE if self.is_packed else 0
        return Codes(self.codes, self.scales, self.scales * -middle)

    def regrouped(self, groups: int) -> Codes:
        """Return the same weight with a multiple of the groups."""
        times = groups // self.scales.shape[1]
        offsets = None if self.offsets is None else self.offsets.repeat_interleave(times, 1)
        return Codes(self.codes, self.scales.repeat_interleave(times, 1), offsets)


def stored(parts: Sequence[Codes]) -> Mapping[str, Tensor | None]:
    """Return the storage of a layer, ``weight``, ``scales`` and ``offsets``, for rows in parts.

    Nothing is rounded. One layer of a GGUF file may have parts of four and of eight bits. Such a
    layer is stored in eight bits.
    """
    if len({part.is_packed for part in parts}) > 1:
        parts = [part.widened() for part in parts]
    if len({part.offsets is None for part in parts}) > 1:
        parts = [part.shifted() for part in parts]
    # One layer has one size of groups. Smaller groups repeat the scales of the larger ones.
    groups = math.lcm(*(part.scales.shape[1] for part in parts))
    weights = []
    scales = []
    offsets = []
    for part in parts:
        regrouped = part.regrouped(groups)
        weights.append(pack_int4(part.codes) if part.is_packed else part.codes)
        scales.append(regrouped.scales)
        if regrouped.offsets is not None:
            offsets.append(regrouped.offsets)
    return {
        "weight": torch.cat(weights),
        "scales": torch.cat(scales),
        "offsets": torch.cat(offsets) if offsets else None,
    }
