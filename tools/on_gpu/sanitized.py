"""Run a kernel on small inputs of each variant, for compute-sanitizer: ``python -m on_gpu.sanitized FORM``."""

from __future__ import annotations

import dataclasses
import sys

import torch
from opgraft.ops.on_triton import triton_kernels, triton_missing
from opgraft.testing import checks
from opgraft.testing.catalogue import SPECS


def main(name: str) -> None:
    missing = triton_missing()
    if missing:
        sys.exit(missing)
    spec = dataclasses.replace(SPECS[name], device="cuda")
    for variant in spec.variants:
        for dtype in (torch.bfloat16, torch.float32):
            checks.check_values(spec, variant, dtype, triton_kernels()[name], brief=True)
        torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1])
