"""The plugin opgraft-ipex, against a package with the names and signatures of Intel's extension 2.8.

``make test-ipex`` runs it on the extension itself.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from pathlib import Path

import opgraft
import pytest
import torch
from opgraft import load_plugins
from opgraft.ops import RMSNorm, RotaryEmbedding, SiluAndMul
from opgraft.registry.state import PluginStatus, host_state

tomllib = pytest.importorskip("tomllib")  # in the standard library from Python 3.11 on

PLUGIN = Path(__file__).parents[2] / "reference_plugins" / "opgraft-ipex"
MATCHING = ".".join(torch.__version__.split(".")[:2]) + ".0"
EXTENSION = "intel_extension_for_pytorch"
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}

if importlib.util.find_spec(EXTENSION):
    pytest.skip(
        f"{EXTENSION} itself is installed: tests/lanes/test_ipex.py runs on it",
        allow_module_level=True,
    )

# From intel_extension_for_pytorch/llm/functional/fusions.py and transformers/models/cpu/fusions/mha_fusion.py of 2.8:
# what the functions are called, take, check and overwrite.
FUNCTIONS = """
import torch
CALLS = []

def in_one_row(weight: torch.Tensor) -> torch.Tensor:
    return weight.as_strided(weight.shape, (1,))  # whatever its strides

def rms_norm(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float):
    CALLS.append("rms_norm")
    assert hidden_states.is_contiguous() and hidden_states.dtype == weight.dtype != torch.float64
    weight = in_one_row(weight)
    wide = hidden_states.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(hidden_states.dtype)

def add_rms_norm(residual, x, weight, bias, eps: float, add_back: bool = False):
    CALLS.append("add_rms_norm")
    assert bias is None, "bias is not supported in add_rmsnorm yet"
    weight, total = in_one_row(weight), residual.float() + x.float()
    if add_back:
        residual.copy_(total)
    return (total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)

def silu_mul(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor = None):
    CALLS.append("silu_mul")
    return torch.nn.functional.silu(x) * y

def rotary_embedding(query, key, sin, cos, rotary_dim: int, rotary_half: bool, position_ids: torch.Tensor = None):
    CALLS.append("rotary_embedding")
    assert query.dim() == key.dim() and query.dim() in (3, 4)
    assert sin.size(-1) * 2 == query.size(-1) or sin.size(-1) == query.size(-1)
    assert sin.size(-1) == cos.size(-1) and len(sin) == len(query)
    for x in (query, key):
        wide, s, c = x.float(), sin.float().unsqueeze(1), cos.float().unsqueeze(1)
        a, b = wide.chunk(2, -1) if rotary_half else (wide[..., 0::2], wide[..., 1::2])
        pair = (a * c - b * s, b * c + a * s)
        x.copy_(torch.cat(pair, -1) if rotary_half else torch.stack(pair, -1).flatten(-2))
    return query, key
"""
# The real one prints and ends the interpreter.
PACKAGE = "import torch\nif not torch.__version__.startswith({0}): raise SystemExit(127)\n"


@pytest.fixture
def plugin(site) -> None:
    """The plugin as pip would install it: its modules, its entry points, its requirements."""
    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]
    points = project["entry-points"]["opgraft.plugins"]
    files = {
        str(path.relative_to(PLUGIN / "src")): path.read_text()
        for path in (PLUGIN / "src").rglob("*.py")
    }
    lines = [f"{name} = {value}" for name, value in points.items()]
    site.install(
        project["name"], files, {"opgraft.plugins": lines}, requires=project["dependencies"]
    )


def install_extension(site, version: str) -> None:
    minor = ".".join(version.split(".")[:2])
    files = {
        f"{EXTENSION}/__init__.py": PACKAGE.format(repr(f"{minor}.")),
        f"{EXTENSION}/llm/__init__.py": "",
        f"{EXTENSION}/llm/functional/__init__.py": FUNCTIONS,
    }
    site.install("intel-extension-for-pytorch", files, "", version=version, requires=())


@pytest.fixture
def calls(plugin, site) -> list[str]:
    """The plugin beside an extension that fits; yields the names of the extension's functions as they are called."""
    install_extension(site, MATCHING)
    load_plugins()
    assert host_state().plugins["ipex"].status is PluginStatus.ACTIVATED
    return importlib.import_module(f"{EXTENSION}.llm.functional").CALLS


def test_without_the_extension_nothing_is_imported(plugin, cli) -> None:
    """The plugin vetoes itself, which is all that the doctor tells, and the ops are those of the catalogue."""
    load_plugins()
    record = host_state().plugins["ipex"]
    assert (record.status, record.reason) == (
        PluginStatus.VETOED,
        "intel-extension-for-pytorch is not installed",
    )
    assert "opgraft_ipex.ops" not in sys.modules
    assert RMSNorm(8).op_class is RMSNorm
    result = cli("plugins", "doctor")
    assert result.returncode == 1
    assert (
        result.stdout.count("finding:")
        == result.stdout.count("as it vetoed itself: intel-extension")
        == 1
    )


def test_an_extension_for_another_torch_is_not_imported(plugin, site) -> None:
    """Versions decide before the import, which would end the interpreter."""
    install_extension(site, "1.9.1")
    load_plugins()
    assert (
        "intel-extension-for-pytorch 1.9.1 works with torch 1.9 only"
        in host_state().plugins["ipex"].reason
    )
    assert EXTENSION not in sys.modules


BROKEN = """
import logging, torch
logging.setLoggerClass(type("Loud", (logging.Logger,), {}))
logging.root.addHandler(logging.NullHandler())
torch.embedding_bag = torch.Tensor.numpy = torch.Tensor.__format__ = None
raise ImportError("a library is missing")
"""


def changeable() -> list[object]:
    """Return what an import of the extension changes."""
    functions = torch.embedding_bag, torch.Tensor.numpy, torch.Tensor.__format__
    return [logging.getLoggerClass(), *logging.root.handlers, *functions]


def test_an_extension_that_fails_leaves_nothing_changed(plugin, site) -> None:
    """What the import has changed is set back, also if the import ends in an error."""
    install_extension(site, MATCHING)
    site.install("broken", {f"{EXTENSION}/__init__.py": BROKEN}, "")
    before = changeable()
    with pytest.raises(ImportError, match="a library is missing"):
        importlib.import_module("opgraft_ipex.plugin").opgraft_register_ops()
    assert changeable() == before


@pytest.mark.parametrize(
    ("version", "vetoed"), [(MATCHING, True), (f"{MATCHING[:-2]}.10+xpu", False)]
)
def test_the_build_for_cpus_serves_no_xpu(plugin, site, version: str, vetoed: bool) -> None:
    """On XPUs the extension's own build for them is needed."""

    class Xpu(type(opgraft.current_platform())):
        name = "xpu"

    install_extension(site, version)
    reason = importlib.import_module("opgraft_ipex.plugin").opgraft_veto(Xpu())
    assert ("no kernels for XPUs" in reason) if vetoed else reason is None


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", [(5, 32), (2, 3, 32), (1, 32)], ids=str)
def test_norm(calls, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """With and without a residual, contiguous or not, the norm is the catalogue's."""
    tolerance = {"atol": TOLERANCES[dtype], "rtol": TOLERANCES[dtype]}
    op = RMSNorm(32).to(dtype)
    torch.nn.init.normal_(op.weight)
    x, residual = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    with torch.no_grad():
        torch.testing.assert_close(op(x), op.forward_native(x), **tolerance)
        strided = torch.randn(*shape[:-1], 64).to(dtype)[..., ::2]
        torch.testing.assert_close(op(strided), op.forward_native(strided), **tolerance)
        expected = op.forward_native(x, residual)
        torch.testing.assert_close(op(x, residual), expected, **tolerance)
    # In half types, the kernel would round the sum before the norm.
    with_residual = ["add_rms_norm"] if dtype is torch.float32 else []
    assert calls == ["rms_norm", "rms_norm", *with_residual]


def test_a_compiler_sees_what_the_norm_writes(calls) -> None:
    """A compiled norm with a residual runs the kernel, and leaves the given residual as it was."""
    op, x, residual = RMSNorm(32), torch.randn(5, 32), torch.randn(5, 32)
    given = residual.clone()
    compiled = torch.compile(
        lambda x, residual: (*op(x, residual), residual + 1), backend="aot_eager", fullgraph=True
    )
    with torch.no_grad():
        results = compiled(x, residual)
        torch.testing.assert_close(results[:2], op.forward_native(x, given))
    assert torch.equal(results[2], given + 1)
    assert torch.equal(residual, given)
    assert calls == ["add_rms_norm"]
    operator = torch.ops.opgraft_ipex.add_rms_norm.default
    torch.library.opcheck(operator, (x, residual, op.weight.detach(), 1e-6))


def test_norm_with_a_strided_weight(calls) -> None:
    """A weight that is a column of a matrix reaches the kernels in one row."""
    op, x = RMSNorm(32), torch.randn(5, 32)
    op.weight = torch.nn.Parameter(torch.randn(32, 3)[:, 1])
    with torch.no_grad():
        torch.testing.assert_close(op(x), op.forward_native(x))
        torch.testing.assert_close(op(x, x.clone()), op.forward_native(x, x.clone()))
    assert calls == ["rms_norm", "add_rms_norm"]


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "heads"), [((7,), False), ((7,), True), ((2, 5), False), ((2, 5), True)]
)
def test_rotary_embedding(
    calls, tokens: tuple[int, ...], heads: bool, dtype: torch.dtype, neox: bool
) -> None:
    """Flat and per head, one sequence or a batch, in either style, the rotation is the catalogue's."""
    op = RotaryEmbedding(16, 16, 64, 10000.0, neox, dtype)
    positions = torch.randint(0, 64, tokens)
    query, key = (torch.randn(*tokens, n, 16).to(dtype) for n in (4, 2))
    if not heads:
        query, key = query.flatten(-2), key.flatten(-2)
    expected = op.forward_native(positions, query, key)
    result = op(positions, query, key)
    torch.testing.assert_close(result, expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
    assert calls == ["rotary_embedding"]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", [(5, 32), (2, 3, 34)], ids=str)
def test_gate(calls, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """The gated activation is the catalogue's."""
    x = torch.randn(shape).to(dtype)
    torch.testing.assert_close(
        SiluAndMul()(x),
        SiluAndMul.forward_native(x),
        atol=TOLERANCES[dtype],
        rtol=TOLERANCES[dtype],
    )
    assert calls == ["silu_mul"]


STEPS_ASIDE = {
    "double precision": lambda: (RMSNorm(8).double(), (torch.randn(2, 8, dtype=torch.float64),)),
    "a weight of another dtype": lambda: (RMSNorm(8), (torch.randn(2, 8, dtype=torch.bfloat16),)),
    "variance of a part": lambda: (RMSNorm(8, var_hidden_size=4), (torch.randn(2, 8),)),
    "no tokens": lambda: (RMSNorm(8), (torch.randn(0, 8),)),
    "no tokens to gate": lambda: (SiluAndMul(), (torch.randn(0, 8),)),
    "no key": lambda: (rotary(8), (torch.arange(3), torch.randn(3, 16))),
    "a part of each head": lambda: (
        rotary(4),
        (torch.arange(3), torch.randn(3, 16), torch.randn(3, 8)),
    ),
    "no positions": lambda: (rotary(8), (torch.arange(0), torch.randn(0, 16), torch.randn(0, 8))),
}


def rotary(rotary_dim: int) -> RotaryEmbedding:
    return RotaryEmbedding(8, rotary_dim, 16, 10000.0, True, torch.float32)


@pytest.mark.parametrize("case", STEPS_ASIDE)
def test_where_the_kernels_do_not_apply(calls, case: str) -> None:
    """The native definition runs for what the extension does not take."""
    op, arguments = STEPS_ASIDE[case]()
    with torch.no_grad():
        result, expected = op(*arguments), op.forward_native(*arguments)
    for ours, reference in zip(
        *((r if isinstance(r, tuple) else (r,)) for r in (result, expected)), strict=True
    ):
        assert (ours is None and reference is None) or torch.equal(ours, reference)
    assert calls == []


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (lambda: RMSNorm(8), (torch.ones(2, 7),), "rms_norm"),
        (lambda: RMSNorm(8), (torch.ones(2, 8), torch.ones(3, 8)), "rms_norm"),
        (lambda: SiluAndMul(), (torch.ones(2, 7),), "silu_and_mul"),
        (
            lambda: rotary(8),
            (torch.arange(3), torch.ones(3, 15), torch.ones(3, 8)),
            "rotary_embedding",
        ),
    ],
)
def test_bad_input_is_refused_as_by_the_catalogue(calls, make, arguments, message: str) -> None:
    """Shapes that do not fit raise the op's own error."""
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        make()(*arguments)
    assert calls == []


def test_gradients_run_the_native_definition(calls) -> None:
    """The extension's kernels have no backward, so they are left out where one is needed."""
    op = RMSNorm(8)
    op(torch.randn(2, 8, requires_grad=True)).sum().backward()
    assert op.weight.grad is not None
    assert calls == []
