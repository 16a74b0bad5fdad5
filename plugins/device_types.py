"""A question to torch: is a device usable?"""

from __future__ import annotations

from typing import Any

import torch


def why_unusable(device: Any) -> Exception | None:
    """Return the error that torch raises for tensors on a device; ``None`` if there is none."""
    try:
        torch.empty(0, device=torch.device(device))
    except (
        RuntimeError,
        TypeError,
        AssertionError,
    ) as error:  # the last for a device that torch lacks
        return error
    return None
