"""The parts in the order in which they run: the most valuable first, as the last ones may find no time."""

from __future__ import annotations

from on_gpu.runner import Part

PARTS = (
    Part(
        "detection",
        "on_gpu.parts.detection",
        "what opgraft says of the machine, against torch and nvidia-smi",
        40,
    ),
    Part(
        "kernels",
        "on_gpu.parts.kernels",
        "every Triton kernel against its reference in float64",
        130,
    ),
)
"""All parts. Their limits may add up to more than the run has: a part that needs less leaves the rest to others."""
