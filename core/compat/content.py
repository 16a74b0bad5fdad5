"""The bytes of a tensor. Torch gives them by way of numpy only, and numpy need not be installed."""

from __future__ import annotations

import torch
from torch import Tensor


def content_of(x: Tensor) -> bytearray:
    """Return the bytes of a tensor in the memory of this process, element after element."""
    flat = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    content = bytearray(flat.nbytes)
    if content:
        torch.frombuffer(content, dtype=torch.uint8).copy_(flat)
    return content
