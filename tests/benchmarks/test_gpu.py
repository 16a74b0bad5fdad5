"""``benchmarks/gpu.py``: what a form of several ops is compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from benchmarks.test_engine import BENCHMARKS
from opgraft.testing.catalogue import SPECS


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark, with native definitions in place of Triton's kernels."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu

    natives = {name: spec.functional.native for name, spec in SPECS.items()}
    monkeypatch.setattr(gpu, "triton_kernels", lambda: natives)
    return gpu


def test_the_kernels_of_each_op_compute_the_form_of_several(gpu: Any) -> None:
    """The rows of both sides have the same codes, so both sides do the same work."""
    joined = {label for label in gpu.CALLS if "_quant_" in label}
    assert len(joined) == 7
    for label in joined:
        name = label.split()[0]
        arguments = gpu.CALLS[label](torch.randn(3, 2048))
        separate: Callable[..., Any] = gpu._separate(name)
        ours, theirs = (_codes(each(*arguments)) for each in (gpu.triton_kernels()[name], separate))
        assert torch.equal(ours, theirs), label
    assert gpu._separate("rms_norm") is None


def _codes(result: Any) -> torch.Tensor:
    """Return the quantized values, as bytes."""
    values: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return values.view(torch.uint8)
