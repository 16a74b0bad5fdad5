"""Shadow mode does no harm: to what others draw, to the caller, to objects, and to kernels that are right."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import opgraft
import pytest
import torch
from opgraft import CustomOp, OpgraftConfig, set_config
from opgraft.binding.shadow import ShadowRow
from opgraft.config import ShadowConfig
from opgraft.ops import RMSNorm, SiluAndMul


def row(op: str) -> ShadowRow:
    """Return the row of the one kernel of an op."""
    (found,) = [each for each in opgraft.shadow_report().rows if each.op == op]
    return found


@pytest.fixture(autouse=True)
def _always() -> Iterator[None]:
    """Every call is compared."""
    with set_config(OpgraftConfig(shadow=ShadowConfig(share=1))):
        yield


@pytest.mark.parametrize("drawing", ["the kernel", "the native definition"])
def test_generators_are_never_set_back(drawing: str) -> None:
    """What another thread draws during a compared call it does not draw again, and the op is not blamed for it."""
    drawn = []

    def draw() -> None:
        thread = threading.Thread(target=lambda: drawn.append(torch.rand(4)))
        thread.start()
        thread.join()

    def kernel(self: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if drawing == "the kernel":
            draw()
        return x

    def native(self: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        draw()
        return x

    RMSNorm.register_oot(
        type("Acme", (RMSNorm,), {"forward_oot": kernel, "forward_native": native})
    )
    RMSNorm(8)(torch.ones(2, 8))
    assert len(drawn) == 1
    assert not torch.equal(torch.rand(4), drawn[0])
    assert row("rms_norm").remark.startswith(
        "1 not compared: random numbers were drawn meanwhile, by it or by another thread"
    )


STRANGE: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "an array": (lambda x: x.numpy(), "ValueError"),
    "sparse": (lambda x: x.to_sparse(), "NotImplementedError"),
}


@pytest.mark.parametrize("case", STRANGE)
def test_results_that_cannot_be_compared_do_not_disturb_the_call(case: str) -> None:
    """An error of the comparison is counted, and is none of the caller's."""
    change, words = STRANGE[case]
    kernels = {
        "forward_oot": lambda self, x: change(2 * x),
        "forward_native": lambda self, x: change(3 * x),
    }
    SiluAndMul.register_oot(type("Acme", (SiluAndMul,), kernels))
    assert SiluAndMul()(torch.ones(2, 8)).shape == (2, 8)
    assert (
        f"1 not compared: its native definition, or the comparison with it, raised {words}"
        in row("silu_and_mul").remark
    )


@pytest.mark.parametrize(
    ("dtype", "error", "drifted"),
    [
        (torch.complex64, 1e-6, 0),
        (torch.complex64, 1e-2, 1),
        (torch.complex128, 1e-6, 1),
        (torch.float8_e4m3fn, 0.05, 0),
        (torch.float8_e4m3fn, 0.3, 1),
        (torch.float8_e5m2, 0.1, 0),
        (torch.float8_e5m2, 0.6, 1),
    ],
)
def test_complex_numbers_and_8_bit_floats(dtype: torch.dtype, error: float, drifted: int) -> None:
    """Complex numbers have the tolerance of their parts; floats of 8 bits may be a step apart, whatever the largest."""
    wide = dtype if dtype.is_complex else torch.float32

    @CustomOp.register("acme_twice")
    class AcmeTwice(CustomOp):
        def forward_native(self, x: torch.Tensor) -> torch.Tensor:
            return (2 * x.to(wide)).conj().to(dtype)

    @AcmeTwice.register_oot
    class FastTwice(AcmeTwice):
        def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
            return (2 * (1 + error) * x.to(wide)).conj().to(dtype)

    AcmeTwice()((1 + torch.rand(5, 7, dtype=wide) * 50).to(dtype))
    found = row("acme_twice")
    assert (found.compared, found.drifted) == (1, drifted), found
    numbers = 70 if dtype.is_complex else 35
    assert not drifted or f" of {numbers} numbers are off" in found.first_drift


class Cache:
    """Remembers what it was given."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []


@dataclass(frozen=True)
class Sizes:
    """Holds no more than both runs may share."""

    of: tuple[int, ...] = (1, 2)


def test_objects_that_two_runs_would_share_are_an_obstacle() -> None:
    """A cache is written to once; what nothing can change is no obstacle."""

    def keep(x: torch.Tensor, cache: Any) -> int:
        if isinstance(cache, Cache):
            cache.kept.append(x)
        return len(getattr(cache, "kept", ()))

    @CustomOp.register("acme_keep")
    class AcmeKeep(CustomOp):
        def forward_native(self, x: torch.Tensor, cache: Any) -> int:
            return keep(x, cache)

    @AcmeKeep.register_oot
    class FastKeep(AcmeKeep):
        def forward_oot(self, x: torch.Tensor, cache: Any) -> int:
            return keep(x, cache)

    acme_keep = AcmeKeep()
    assert acme_keep(torch.ones(2), cache := Cache()) == len(cache.kept) == 1
    remark = "1 not compared: an argument is a Cache, which two runs would share and may change"
    assert (row("acme_keep").remark, row("acme_keep").compared) == (remark, 0)
    for harmless in (
        None,
        1,
        2.0,
        "a",
        torch.float32,
        torch.device("cpu"),
        torch.Size((1,)),
        Sizes(),
        slice(1),
    ):
        acme_keep(torch.ones(2), harmless)
    assert (row("acme_keep").compared, row("acme_keep").drifted) == (9, 0)
