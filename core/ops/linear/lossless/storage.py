"""The storage of bfloat16 weights in 12 bits, without loss.

The exponents of a trained weight are few: 16 of them cover all but about one number in 10,000. So
a number is stored in 12 bits: the sign, seven bits of mantissa, and four bits for the place of the
exponent among these 16.

A row is cut into units of 64 inputs. A unit has 96 bytes:

- 32 little-endian words of 16 bits. Word ``k`` has sign and mantissa of input ``k`` where bfloat16
  has them, bits 15 and 6 to 0. Sign and mantissa of input ``32 + k`` are there as well, with the
  two bytes of the word swapped: bits 7 and 14 to 8.
- 32 bytes. The low half of byte ``k`` is the place of the exponent of input ``k``, the high half
  that of input ``32 + k``.

So a processor decodes 32 adjacent inputs at once. Inputs beyond the last whole unit of a row stay
plain, two bytes each.

A unit with another exponent is stored plain, too, in a list of such units. ``places`` has their
numbers in the weight, counted row by row, in ascending order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

UNIT = 64
"""Inputs in a unit."""

WORDS = 32
"""16-bit words in a unit, and bytes with places of exponents."""

UNIT_BYTES = 96
"""Bytes of a unit."""

EXPONENTS = 16
"""Exponents that have a place."""

END = 2**31 - 1
"""The last entry of ``places``, behind all units. A kernel need not look for the end."""

AT_ONCE = 1 << 22
"""Numbers of a weight to read at once."""

# The bits of sign and mantissa in a word of bfloat16, and in either byte of a word of a unit.
_IN_PLACE = 0x807F
_SIGN = 0x80
_MANTISSA = 0x7F


class LosslessWeight(NamedTuple):
    """A weight ``[out_features, in_features]`` in 12 bits.

    Attributes:
        codes: ``[out_features, row_bytes(in_features)]`` in ``uint8``.
        exponents: the biased exponents, ``[16]`` in ``uint8``.
        places: the numbers of the units that are stored plain, then ``END``; ``int32``.
        units: the bits of these units, ``[len(places), 64]`` in ``int16``. The last is not used.
    """

    codes: Tensor
    exponents: Tensor
    places: Tensor
    units: Tensor


def row_bytes(in_features: int) -> int:
    """Return the bytes of a row of codes."""
    return in_features // UNIT * UNIT_BYTES + in_features % UNIT * 2


def to_12_bits(weight: Tensor) -> LosslessWeight:
    """Store a weight in 12 bits. ``from_12_bits`` returns the same bits, of NaN too.

    Args:
        weight: ``[out_features, in_features]`` in bfloat16.

    Raises:
        ValueError: the dtype or the shape does not fit, or the weight has 2^37 numbers or more.
    """
    _expect_matrix(weight)
    columns = max(weight.shape[1], 1)
    words = weight.detach().contiguous().view(torch.int16)

    # A part has few rows, so that the memory for copies stays small.
    parts = torch.split(words, max(1, AT_ONCE // columns))
    exponents = _frequent_exponents(parts)
    place_of = _places_by_exponent(exponents)
    codes = []
    others = []
    for part in parts:
        made, has_other = _codes_of(part, place_of)
        codes.append(made)
        others.append(has_other)

    places, units = _plain_units(words, torch.cat(others))
    return LosslessWeight(torch.cat(codes), exponents, places, units)


def _expect_matrix(weight: Tensor) -> None:
    if weight.dtype != torch.bfloat16 or weight.dim() != 2:
        shape = tuple(weight.shape)
        raise ValueError(
            f"to_12_bits: weight has shape {shape} and dtype {weight.dtype}, expected "
            "[out_features, in_features] in torch.bfloat16"
        )

    rows, columns = weight.shape
    count = rows * (columns // UNIT)
    if count >= END:
        raise ValueError(f"to_12_bits: weight has {count} units, expected below {END}")


def _frequent_exponents(parts: tuple[Tensor, ...]) -> Tensor:
    """Return the 16 most frequent exponents in ascending order; of equals, the smaller ones."""
    counts = torch.zeros(256, dtype=torch.int64, device=parts[0].device)
    for part in parts:
        exponents = _exponents(part.int())
        counts += torch.bincount(exponents.flatten(), minlength=256)
    order = torch.sort(counts, descending=True, stable=True).indices
    return order[:EXPONENTS].sort().values.to(torch.uint8)


def _exponents(words: Tensor) -> Tensor:
    """Return the biased exponents of words of bfloat16. Bits above the word do not matter."""
    return words >> 7 & 0xFF


def _places_by_exponent(exponents: Tensor) -> Tensor:
    """Return the place of each of 256 exponents, -1 for none."""
    places = torch.full((256,), -1, dtype=torch.int32, device=exponents.device)
    order = torch.arange(EXPONENTS, dtype=torch.int32, device=exponents.device)
    places[exponents.long()] = order
    return places


def _codes_of(words: Tensor, place_of: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes of some rows, and for each unit True if it has another exponent.

    Args:
        words: the rows as ``int16``.
        place_of: place of each biased exponent, -1 for none.
    """
    rows, columns = words.shape
    units_of_row = columns // UNIT
    whole = units_of_row * UNIT
    shape = (rows, units_of_row, 2, WORDS)

    units = words[:, :whole]
    units = units.reshape(shape)
    units = units.int() & 0xFFFF

    places = place_of[_exponents(units)]
    is_other = places < 0
    has_other = is_other.flatten(2).any(-1)
    pairs = _paired(units).to(torch.int16)

    # A number without a place is read from the list, whatever its code is.
    low, high = places.clamp(min=0).unbind(2)
    halves = low | high << 4
    of_units = (pairs.view(torch.uint8), halves.to(torch.uint8))
    bytes_of_units = torch.cat(of_units, -1).flatten(1)

    rest = words[:, whole:].contiguous()
    codes = torch.cat((bytes_of_units, rest.view(torch.uint8)), 1)
    return codes, has_other


def _paired(units: Tensor) -> Tensor:
    """Return words with signs and mantissas of both halves of units ``[rows, units, 2, 32]``."""
    first, second = units.unbind(2)
    first = first & _IN_PLACE
    mantissas = (second & _MANTISSA) << 8
    signs = second >> 8 & _SIGN
    return first | mantissas | signs


def _plain_units(words: Tensor, is_plain: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tensors ``places`` and ``units`` of a weight.

    Args:
        words: the weight as ``int16``.
        is_plain: True for each unit in the list, ``[out_features, units of a row]``.
    """
    rows, units_of_row = is_plain.shape
    whole = words[:, : units_of_row * UNIT]
    units = whole.reshape(rows, units_of_row, UNIT)

    listed = units[is_plain]
    places = is_plain.flatten().nonzero()
    places = places.flatten().int()

    # A search for a place behind the last one finds this entry.
    end = places.new_full((1,), END)
    unused = listed.new_zeros(1, UNIT)
    places = torch.cat((places, end))
    units = torch.cat((listed, unused))
    return places, units


def from_12_bits(
    codes: Tensor,
    exponents: Tensor,
    places: Tensor,
    units: Tensor,
    in_features: int,
    rows: Tensor | None = None,
) -> Tensor:
    """Return the plain weight: the given rows, or all.

    Args:
        codes: as in ``LosslessWeight``.
        exponents: as in ``LosslessWeight``.
        places: as in ``LosslessWeight``.
        units: as in ``LosslessWeight``.
        in_features: of a row.
        rows: numbers of rows, in one dimension.

    Returns:
        ``[rows, in_features]`` in bfloat16.
    """
    if rows is None:
        rows = torch.arange(codes.shape[0], device=codes.device)
    else:
        codes = codes[rows]

    units_of_row = in_features // UNIT
    size = units_of_row * UNIT_BYTES
    shape = (len(codes), units_of_row, UNIT_BYTES)
    of_units = codes[:, :size].reshape(shape)
    decoded = _decoded(of_units.int(), exponents)

    columns = torch.arange(units_of_row, device=codes.device)
    first = rows * units_of_row
    numbers = first[:, None] + columns

    found = torch.searchsorted(places, numbers.int())
    is_plain = places[found] == numbers
    listed = units[found]
    whole = torch.where(is_plain[..., None], listed, decoded)

    rest = _words(codes[:, size:].int())
    words = torch.cat((whole.flatten(1), rest.to(torch.int16)), 1)
    return words.view(torch.bfloat16)


def _words(two_bytes: Tensor) -> Tensor:
    """Return little-endian words of bytes in ``int32``."""
    low = two_bytes[..., ::2]
    high = two_bytes[..., 1::2]
    return low | high << 8


def _decoded(units: Tensor, exponents: Tensor) -> Tensor:
    """Return the words of bfloat16 of units ``[..., 96]``, ``[..., 64]`` in ``int16``."""
    size = 2 * WORDS
    pairs = _words(units[..., :size])
    places = units[..., size:].long()

    low_places = places & (EXPONENTS - 1)
    high_places = places >> 4
    in_place = exponents.int() << 7

    first = pairs & _IN_PLACE
    first = first | in_place[low_places]

    mantissas = pairs >> 8 & _MANTISSA
    signs = (pairs & _SIGN) << 8
    second = signs | mantissas
    second = second | in_place[high_places]

    both = torch.cat((first, second), -1)
    return both.to(torch.int16)


def expect_lossless(
    op: str,
    codes: Tensor,
    exponents: Tensor,
    places: Tensor,
    units: Tensor,
    in_features: int,
    device: torch.device,
) -> None:
    """Raise ``ValueError`` unless the tensors hold a weight for ``in_features`` on ``device``."""
    rows = codes.shape[0] if codes.dim() else 0
    width = row_bytes(in_features)
    count = places.numel()
    expected = {
        "weight": (codes, (rows, width), torch.uint8),
        "exponents": (exponents, (EXPONENTS,), torch.uint8),
        # At least the end.
        "places": (places, (max(count, 1),), torch.int32),
        "units": (units, (count, UNIT), torch.int16),
    }
    for name, (tensor, shape, dtype) in expected.items():
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise ValueError(
                f"{op}: {name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}, expected "
                f"{list(shape)} in {dtype} for {in_features} inputs"
            )
        if tensor.device != device:
            raise ValueError(f"{op}: {name} is on {tensor.device}, expected {device} as x")
