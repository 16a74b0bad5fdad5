"""An exception is traced to the op, the provider, the line and the setting; ranges of the profiler name both."""

from __future__ import annotations

import re
import sys
from concurrent.futures import ThreadPoolExecutor

import opgraft
import pytest
import torch
from opgraft import OpgraftConfig, functional, set_config
from opgraft.binding import provenance
from opgraft.config import parse_text
from opgraft.ops import GELU, GatedMLP, Linear, RMSNorm
from opgraft.registry.state import host_state
from torch import nn

PLUGIN = """
import opgraft
import torch
from opgraft.ops import RMSNorm
platforms = "any"
class Acme(RMSNorm):
    {extra}
    def forward_oot(self, x, residual=None):
        return helper(x)
def helper(x):
    raise RuntimeError("a driver of 1998")  # line 11
@opgraft.hookimpl
def opgraft_register_ops():
    RMSNorm.register_oot(Acme)
"""


@pytest.fixture
def acme(site) -> None:
    """A plugin whose kernel for ``rms_norm`` raises."""
    site.plugin("acme-dist", PLUGIN.format(extra="pass"), version="2.5")


def raised_by(call) -> BaseException:
    try:
        call()
    except Exception as error:
        return error
    pytest.fail("nothing was raised")


def test_a_kernel_that_raises_is_named_with_the_setting_that_goes_without_it(acme) -> None:
    """Op, kernel, provider with version, the innermost line; the setting, pasted, has the op work."""
    told = opgraft.explain_exception(
        raised_by(lambda: nn.Sequential(RMSNorm(4))(torch.randn(2, 4)))
    )
    assert told is not None
    assert (told.op, told.kernel) == ("rms_norm", "Acme.forward_oot")
    assert str(told.provider) == "acme-dist 2.5"
    assert re.search(r"acme_dist\.py:11$", told.location)
    assert "OPGRAFT_PLUGINS_DISABLE=acme_dist" in told.setting
    pasted = re.search(r"OPGRAFT_PROVIDERS=(\S+),", told.setting)
    assert pasted
    x = torch.randn(3, 4)
    with set_config(OpgraftConfig(providers=parse_text("providers", pasted[1]))):
        torch.testing.assert_close(
            RMSNorm(4)(x).double(), nn.functional.rms_norm(x.double(), (4,), eps=1e-6)
        )
    assert told.to_dict()["location"] == told.location
    assert str(told).startswith("raised in op rms_norm, by Acme.forward_oot of acme-dist 2.5 at ")


def test_the_cause_of_an_error_is_what_counts(acme) -> None:
    """An error that was raised from another one, or while it was handled, is traced to the first."""

    def wrapped() -> None:
        try:
            RMSNorm(4)(torch.randn(2, 4))
        except RuntimeError as error:
            raise ValueError("a step failed") from error

    told = opgraft.explain_exception(raised_by(wrapped))
    assert told is not None
    assert told.kernel == "Acme.forward_oot"


def test_a_constructor_that_raises(site) -> None:
    """While an op is constructed the class is at fault, whatever its kernel would be."""
    site.plugin(
        "acme",
        PLUGIN.format(
            extra="def __init__(self, *sizes, **named):\n        super().__init__(*sizes, **named)\n        1 / 0"
        ),
    )
    told = opgraft.explain_exception(raised_by(lambda: RMSNorm(4)))
    assert told is not None
    assert told.kernel == "Acme.__init__"
    assert "OPGRAFT_PROVIDERS=rms_norm=native" in told.setting


def test_of_nested_ops_the_innermost_is_named() -> None:
    """A layer that runs another op is not what raised; its native definition has no setting to go without."""
    with set_config(OpgraftConfig(providers="gated_mlp=native,linear=native")):
        model = GatedMLP(4, 8, "silu")
    model.down_proj.weight = nn.Parameter(torch.randn(4, 7))
    told = opgraft.explain_exception(raised_by(lambda: model(torch.randn(2, 4))))
    assert told is not None
    assert (told.op, told.kernel) == ("linear", "Linear.forward_native")
    assert told.setting == ""


def test_a_functional_form_that_raises(acme) -> None:
    """A form is traced by the kernel that it runs."""
    told = opgraft.explain_exception(
        raised_by(lambda: functional.rms_norm(torch.randn(2, 4), torch.ones(3), 1e-6))
    )
    assert told is not None
    assert told.op == "rms_norm"


def test_outside_of_ops_the_plugin_is_named(site) -> None:
    """Code of a plugin that raised by itself is named with the setting that disables the plugin."""
    site.plugin("brix", "def opgraft_nothing():\n    raise OSError('gone')\n", version="0.3")
    import brix  # type: ignore[import-not-found]

    told = opgraft.explain_exception(raised_by(brix.opgraft_nothing))
    assert told is not None
    assert (told.op, told.kernel, str(told.provider)) == ("", "opgraft_nothing", "brix 0.3")
    assert told.location.endswith("brix.py:2")
    assert told.setting == "OPGRAFT_PLUGINS_DISABLE=brix"


def test_a_function_that_takes_an_op_is_no_kernel(acme) -> None:
    """Code that has an op as its first argument, and raises by itself, is blamed on nobody."""

    def train_step(layer: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return batch["missing"]

    for op in (RMSNorm(4), functional.rms_norm):
        assert opgraft.explain_exception(raised_by(lambda op=op: train_step(op, {}))) is None


def test_a_kernel_behind_a_decorator_or_of_a_mixin_is_named(site) -> None:
    """Its frame is none of the class's own functions, and still that of the bound kernel."""
    kernel = "def forward_oot(self, x, residual=None):\n        raise RuntimeError('gone')"
    source = f"""
import torch
from opgraft.ops import GELU, RMSNorm
platforms = "any"
class Fast:
    {kernel}
@RMSNorm.register_oot
class Acme(Fast, RMSNorm):
    pass
@GELU.register_oot
class AcmeGELU(GELU):
    @torch.no_grad()
    {kernel.replace(", residual=None", "")}
"""
    site.plugin("acme", source)
    for op, kernel in ((RMSNorm(4), "Fast.forward_oot"), (GELU(), "AcmeGELU.forward_oot")):
        told = opgraft.explain_exception(raised_by(lambda op=op: op(torch.randn(2, 4))))
        assert told is not None
        assert told.kernel == kernel
        assert told.op


def test_what_is_no_business_of_opgraft() -> None:
    """An exception of other code, or one that was never raised, has no op."""
    assert opgraft.explain_exception(ValueError("nobody raised it")) is None
    assert opgraft.explain_exception(raised_by(lambda: nn.Linear(4, 4)(torch.randn(2, 3)))) is None


def test_the_excepthook_adds_a_line_and_is_taken_back(acme, monkeypatch, capsys) -> None:
    """What the hook before it wrote stays, one line follows; the undo puts that hook back."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    undo = opgraft.install_excepthook()
    error = raised_by(lambda: RMSNorm(4)(torch.randn(2, 4)))
    sys.excepthook(type(error), error, error.__traceback__)
    *trace, line = capsys.readouterr().err.splitlines()
    assert trace[-1] == "RuntimeError: a driver of 1998"
    assert line == str(opgraft.explain_exception(error))
    undo()
    assert sys.excepthook is sys.__excepthook__


def test_ranges_of_the_profiler_name_op_kernel_and_provider(site) -> None:
    """Within a block each call is a range, as a module or a form; outside there is none, and calls are as before."""
    source = PLUGIN.replace('raise RuntimeError("a driver of 1998")', "return x")
    site.plugin("acme", source.format(extra="pass"))
    norm, linear, x = RMSNorm(4), Linear(4, 4), torch.randn(2, 4)
    plain = (opgraft.CustomOp.__call__, type(functional.rms_norm).__call__)
    with torch.profiler.profile() as watched:
        linear(x)
        with opgraft.profile(), opgraft.profile():
            norm(x)
            functional.silu_and_mul(x)
            compiled = torch.compile(norm, fullgraph=True, backend="eager")
            torch.testing.assert_close(compiled(x), x)
            with pytest.raises(ValueError, match="rms_norm"):
                functional.rms_norm(x, torch.ones(3), 1e-6)
    own = f"[opgraft {opgraft.__version__}]"
    assert sorted(e.key for e in watched.key_averages() if e.key.startswith("opgraft.")) == [
        "opgraft.rms_norm Acme.forward_oot [acme 1.0]",
        f"opgraft.rms_norm rms_norm.native {own}",
        f"opgraft.silu_and_mul silu_and_mul.native {own}",
    ]
    assert (opgraft.CustomOp.__call__, type(functional.rms_norm).__call__) == plain
    assert host_state().plugins["acme"].status.value == "activated"


def test_blocks_of_the_profiler_that_overlap() -> None:
    """Blocks of two threads end in any order: there are ranges until the last has ended, and none afterwards."""
    norm, x = RMSNorm(4), torch.randn(2, 4)
    first, second = opgraft.profile(), opgraft.profile()
    with torch.profiler.profile() as watched:
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        norm(x)
        functional.silu_and_mul(x)
        second.__exit__(None, None, None)
        norm(x)
    found = {
        e.key.split()[0]: e.count for e in watched.key_averages() if e.key.startswith("opgraft.")
    }
    assert found == {"opgraft.rms_norm": 1, "opgraft.silu_and_mul": 1}


HOLDING = """
import threading, weakref
from opgraft.ops import RMSNorm
platforms = "any"
ready, go = threading.Event(), threading.Event()
freed = []
class Held:
    pass
class Acme(RMSNorm):
    def forward_oot(self, x, residual=None):
        held = Held()
        noted = weakref.ref(held)
        ready.set()
        go.wait(5)
        del held
        freed.append(noted() is None)
        return x
RMSNorm.register_oot(Acme)
"""


def test_variables_of_calls_of_other_threads_are_not_read(site) -> None:
    """Python may crash where another thread's variables are read, and would keep what they hold."""
    site.plugin("acme", HOLDING)
    norm = RMSNorm(8)
    acme = sys.modules["acme"]
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(norm, torch.ones(2, 8))
        assert acme.ready.wait(5)
        (thread,) = threads._threads
        frame = sys._current_frames()[thread.ident]
        told = provenance._running_call(frame)
        acme.go.set()
        answer.result(5)
    assert told is not None
    assert told.what.startswith("Acme.forward_oot of acme 1.0 in op rms_norm at ")
    assert acme.freed == [True]
