"""Discrete Intel GPUs by PCI device id; all others are part of a processor.

Ids: include/drm/intel/pciids.h of Linux (PVC, ATS-M, DG2, BMG, CRI). Names:
shared/source/dll/devices of intel/compute-runtime. Tiles and memory of the data-centre parts:
Intel's product pages (ark.intel.com).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Card:
    """A kind of card.

    ``memory`` is the GiB of the whole card, ``None`` if cards of one id differ.
    """

    name: str
    architecture: str
    tiles: int = 1
    memory: int | None = None


def _card_rows() -> Iterable[tuple[Iterable[int], Card]]:
    yield (0x0BD5, 0x0BD6), Card("Data Center GPU Max 1550", "Xe-HPC", 2, 128)
    yield (0x0B69,), Card("Data Center GPU Max 1450", "Xe-HPC", 2, 128)
    yield (0x0BD7, 0x0BD8), Card("Data Center GPU Max 1350", "Xe-HPC", 2, 96)
    yield (0x0BD9, 0x0BDA, 0x0BDB), Card("Data Center GPU Max 1100", "Xe-HPC", 1, 48)
    yield (0x0B6E, 0x0BD4, 0x0BE0, 0x0BE1, 0x0BE5), Card("Data Center GPU Max", "Xe-HPC")
    yield (0x56C0, 0x56C2), Card("Data Center GPU Flex 170", "Xe-HPG", 1, 16)
    # A card has two of these chips, with 6 GiB each.
    yield (0x56C1,), Card("Data Center GPU Flex 140", "Xe-HPG", 1, 6)
    yield (*range(0x5690, 0x5698), *range(0x56A0, 0x56A7)), Card("Arc A-series", "Xe-HPG")
    yield (*range(0x56B0, 0x56B4), *range(0x56BA, 0x56C0)), Card("Arc Pro A-series", "Xe-HPG")
    yield (0xE20B,), Card("Arc B580", "Xe2-HPG", 1, 12)
    yield (0xE20C,), Card("Arc B570", "Xe2-HPG", 1, 10)
    others = (0xE202, 0xE209, 0xE20D, 0xE210, 0xE211, 0xE212, 0xE216, *range(0xE220, 0xE224))
    yield others, Card("Arc B-series", "Xe2-HPG")
    yield range(0x674C, 0x6751), Card("Crescent Island", "Xe3P")


CARDS = {identity: card for identities, card in _card_rows() for identity in identities}
