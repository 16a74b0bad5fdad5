"""Put every Triton kernel before its reference in float64: each dtype, odd sizes, strided views, empty tensors."""

from __future__ import annotations

import dataclasses
import os
from contextlib import nullcontext
from pathlib import Path

import torch
from opgraft.ops.on_triton import triton_kernels, triton_missing
from opgraft.ops.spec import OpSpec
from opgraft.testing import checks
from opgraft.testing.catalogue import SPECS

from on_gpu.device import DEVICE, ON_GPU
from on_gpu.interpreter import exact_arithmetic
from on_gpu.pool import run_all
from on_gpu.rows import FAILED, Row, Rows

DTYPES = ("float32", "bfloat16", "float16")
SECONDS = 60.0
"""The limit of one kernel in one dtype, its compilations included."""

SLOW = ("attention", "experts", "scan", "conv", "mla")
"""Parts of the names of forms whose kernels take longest to compile: these begin first."""


def run(rows: Rows, bundle: Path) -> None:
    missing = triton_missing()
    if missing:
        rows.add(Row("Triton", FAILED, missing))
        return
    names = sorted(triton_kernels(), key=lambda name: not any(word in name for word in SLOW))
    tasks = [(name, dtype) for name in names for dtype in DTYPES]
    seconds = SECONDS if ON_GPU else 60 * SECONDS
    for done in run_all(check, tasks, os.cpu_count() or 1, seconds):
        what = " ".join(done.arguments)
        if done.error:
            rows.add(Row(what, FAILED, done.error))
        else:
            rows.add(Row(what, detail=f"largest error {done.value:.2f} of its tolerance"))
    if not ON_GPU:
        rows.no_device("kernels as compiled: here Triton interprets them")


def check(name: str, dtype_name: str) -> float:
    """Check a kernel in a dtype; return its largest error as a share of the tolerance.

    Raises:
        AssertionError: a check fails; the message names the variants.
    """
    torch.set_num_threads(1)  # a process for each processor
    spec = dataclasses.replace(SPECS[name], device=DEVICE)
    shares, failures = [0.0], []
    # The interpreter takes minutes for all variants: make test-triton has them.
    for variant in list(spec.variants)[: None if ON_GPU else 1]:
        try:
            shares.append(_checked(spec, variant, getattr(torch, dtype_name)))
        except AssertionError as error:
            failures.append(f"{variant or 'plain'}: {error}")
    if failures:
        raise AssertionError(f"{len(failures)} of {len(spec.variants)} variants: {failures[0]}")
    return max(shares)


def _checked(spec: OpSpec, variant: str, dtype: torch.dtype) -> float:
    """Check a kernel on the inputs of a variant; the interpreter, which is slow, gets few of them."""
    kernel = triton_kernels()[spec.functional.name]
    with nullcontext() if ON_GPU else exact_arithmetic():
        share = checks.check_values(spec, variant, dtype, kernel, brief=not ON_GPU)
        if dtype == torch.float32 and ON_GPU:
            checks.check_strides(spec, variant, kernel)
        if dtype == torch.bfloat16:
            checks.check_effects(spec, variant, dtype, kernel)
    if ON_GPU:
        torch.cuda.synchronize()  # so that a fault of this variant shows here
    return share
