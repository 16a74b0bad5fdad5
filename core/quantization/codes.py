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
    """Some rows of a weight, ``code · scale + offset`` by group of inputs.

    Attributes:
        codes: ``[rows, in_features]``, in ``int8``, or from 0 to 15 in ``uint8``.
        scales: ``[rows, groups]`` in a floating-point dtype.
        offsets: as the scales. Without offsets, codes in ``uint8`` stand for ``(code - 8) ·
            scale``.
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None = None

    @property
    def is_packed(self) -> bool:
        """Say whether the codes have four bits."""
        return self.codes.dtype == torch.uint8

    def widened(self) -> Codes:
        """Return the same weight with codes in ``int8``."""
        if not self.is_packed:
            return self
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
    """Return the storage of a layer for rows one after another: ``weight``, ``scales`` and
    ``offsets``.

    Nothing is rounded. Parts of four and of eight bits, as one layer may have in a GGUF file, are
    all held in eight.
    """
    if len({part.is_packed for part in parts}) > 1:
        parts = [part.widened() for part in parts]

    if len({part.offsets is None for part in parts}) > 1:
        parts = [part.shifted() for part in parts]

    groups = math.lcm(*(part.scales.shape[1] for part in parts))
    parts = [part.regrouped(groups) for part in parts]
    rows = [pack_int4(part.codes) if part.is_packed else part.codes for part in parts]
    offsets = [part.offsets for part in parts if part.offsets is not None]
    scales = torch.cat([part.scales for part in parts])
    return {
        "weight": torch.cat(rows),
        "scales": scales,
        "offsets": torch.cat(offsets) if offsets else None,
    }
