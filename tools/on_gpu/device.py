"""The device that parts run on. Without a GPU it is the CPU, and Triton interprets its kernels."""

from __future__ import annotations

import os

import torch

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"

if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported, which is later
