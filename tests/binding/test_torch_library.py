"""Functions of plugins as torch ops."""

from __future__ import annotations

import importlib

import opgraft
import pytest
import torch
from opgraft.errors import ConflictError
from torch.library import Library


def acme_double(x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
    return x * factor


def acme_double_fake(x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
    return torch.empty_like(x)


def acme_fill(x: torch.Tensor) -> None:
    x.fill_(7)


def test_a_function_becomes_an_op_that_compiles_as_one_node() -> None:
    """The op is called as torch.ops.opgraft.<name>, eagerly and compiled; registering it again is a no-op."""
    for _ in range(2):
        opgraft.direct_register_custom_op("acme_double", acme_double, fake_impl=acme_double_fake)
    double = torch.ops.opgraft.acme_double
    x = torch.randn(3)
    assert torch.equal(double(x, 3.0), 3 * x)
    torch.library.opcheck(double.default, (x,), test_utils=("test_schema", "test_faketensor"))
    assert torch.equal(
        torch.compile(lambda x: double(x) + 1, fullgraph=True, backend="eager")(x), 2 * x + 1
    )


def test_an_op_may_write_to_its_arguments() -> None:
    """mutates_args states it in the schema, as vLLM's plugins do."""
    opgraft.direct_register_custom_op(
        op_name="acme_fill",
        op_func=acme_fill,
        mutates_args=["x"],
        dispatch_key="CPU",
        tags=(torch.Tag.pt2_compliant_tag,),
    )
    x = torch.zeros(2)
    assert torch.ops.opgraft.acme_fill(x) is None
    assert (x == 7).all()
    assert torch.ops.opgraft.acme_fill.default._schema.is_mutable


def test_a_library_of_the_plugins_own() -> None:
    """target_lib registers under another namespace."""
    library = Library("acme_ops", "FRAGMENT")
    opgraft.direct_register_custom_op("twice", acme_double, target_lib=library)
    assert torch.equal(torch.ops.acme_ops.twice(torch.ones(1)), torch.full((1,), 2.0))


@pytest.mark.parametrize("name", ["rms_norm", "acme_taken"])
def test_a_name_that_is_taken_is_an_error(name: str) -> None:
    """Neither a functional form nor the op of another function is replaced in silence."""
    opgraft.direct_register_custom_op("acme_taken", acme_fill, ["x"])
    with pytest.raises(
        ConflictError, match=rf"torch.ops.opgraft.{name} is registered already.*target_lib"
    ):
        opgraft.direct_register_custom_op(name, acme_double)


def test_a_reloaded_function_takes_the_place_of_the_old_one(site) -> None:
    """Reloading a plugin's module registers what it says now."""
    source = (
        "import opgraft, torch\ndef acme_add(x: torch.Tensor) -> torch.Tensor:\n    return x + {}\n"
        "opgraft.direct_register_custom_op('acme_add', acme_add)\n"
    )
    file = site.folder / "acme_library.py"
    file.write_text(source.format(1))
    module = importlib.import_module("acme_library")
    assert torch.ops.opgraft.acme_add(torch.zeros(1)) == 1
    file.write_text(
        source.format(2000)
    )  # another length, so that no cached bytecode is taken for it
    importlib.reload(module)
    assert torch.ops.opgraft.acme_add(torch.zeros(1)) == 2000
