"""Entries of the cache: write a compiled model, and read it in another process without tracing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from opgraft.base.text import described
from opgraft.compat.graphs import flattened, structure_of_text, structure_to_text
from opgraft.compilation.code import Code
from opgraft.compilation.example import Example
from opgraft.compilation.graph_pass import PassReport
from opgraft.compilation.inputs import ExpectedInput, Signature
from opgraft.compilation.lowering import Lowering, lowerings_of
from opgraft.compilation.packages import Packages, loaded
from opgraft.compilation.tensors import tensors_of
from opgraft.errors import CacheEntryError
from torch import Tensor, nn

_PLAIN = (bool, int, float, str, type(None))


def write_signature(signature: Signature) -> dict[str, Any]:
    """Describe the call of a graph.

    Raises:
        CacheEntryError: a constant, or a container of the result, cannot be written.
    """
    constants = (*signature.constants.values(), *signature.results.values())
    unwritable = [value for value in constants if not isinstance(value, _PLAIN)]
    if unwritable:
        raise CacheEntryError(
            f"a constant of the call, a {type(unwritable[0]).__name__}, cannot be written"
        )
    try:
        out_spec = structure_to_text(signature.out_spec)
    # torch raises errors of several classes for a container without a name.
    except Exception as error:
        raise CacheEntryError(
            f"the structure of the result cannot be written: {described(error)}"
        ) from error
    expected = [
        [each.name, str(each.dtype), str(each.device), each.sizes, each.is_written]
        for each in signature.expected
    ]
    return {
        "inputs": signature.inputs,
        "constants": [*signature.constants.items()],
        "results": [*signature.results.items()],
        "out_spec": out_spec,
        "expected": expected,
        "bounds": signature.bounds,
    }


def read_signature(description: Mapping[str, Any], example: Example) -> Signature:
    """Undo ``write_signature``.

    Args:
        description: the result of ``write_signature``.
        example: a call like the captured one.
    """
    _, in_spec = flattened((example.args, dict(example.kwargs)))
    bounds = {name: (low, high) for name, (low, high) in description["bounds"].items()}
    return Signature(
        inputs=tuple(description["inputs"]),
        constants=dict(description["constants"]),
        in_spec=in_spec,
        out_spec=structure_of_text(description["out_spec"]),
        expected=tuple(map(_read_expected, description["expected"])),
        bounds=bounds,
        results=dict(description["results"]),
    )


def _read_expected(row: Any) -> ExpectedInput:
    name, dtype, device, sizes, is_written = row
    kind = getattr(torch, dtype.removeprefix("torch."))
    return ExpectedInput(name, kind, torch.device(device), tuple(sizes), is_written)


def write_code(code: Code, name: str, folder: Path) -> dict[str, Any]:
    """Describe code in a package, and write the tensors outside of the model into a folder.

    Raises:
        CacheEntryError: the code is in no package.
    """
    packaged = code.packaged
    if packaged is None:
        raise CacheEntryError(code.unkept)
    if packaged.values:
        torch.save(dict(packaged.values), folder / f"{name}.pt")
    return {
        "package": packaged.key,
        "origins": packaged.origins,
        "values": f"{name}.pt" if packaged.values else None,
        "forms": {each.form.name: [each.nodes, each.chosen] for each in code.lowerings},
        "passes": [dataclasses.astuple(report) for report in code.passes],
    }


def read_code(
    model: nn.Module, description: Mapping[str, Any], folder: Path, packages: Packages
) -> Code:
    """Undo ``write_code`` for the tensors of a model.

    Raises:
        CacheEntryError: a file is damaged, or the code was compiled for other kernels or another
            model.
    """
    lowerings = _read_lowerings(description["forms"])
    values: dict[str, Tensor] = {}
    if description["values"]:
        values = torch.load(folder / description["values"], weights_only=True)
    tensors, parts = tensors_of(model, description["origins"], values)
    reports = tuple(map(_read_report, description["passes"]))
    run = loaded(packages.file_of(description["package"]), tensors)
    used = (*tensors.values(), *parts)
    return Code(None, reports, lowerings, run, used, tuple(parts))


def _read_lowerings(forms: Mapping[str, Any]) -> tuple[Lowering, ...]:
    """Return the lowering of each form now.

    Raises:
        CacheEntryError: a form runs another kernel than before.
    """
    lowerings = lowerings_of({name: count for name, (count, _) in forms.items()})
    for each in lowerings:
        _, chosen = forms[each.form.name]
        if each.chosen != chosen:
            raise CacheEntryError(
                f"the kernel of {each.form.name} was {chosen} and is {each.chosen}"
            )
    return lowerings


def _read_report(row: Any) -> PassReport:
    name, source, matched, replaced, (before, after), left = row
    return PassReport(name, source, matched, replaced, (before, after), tuple(left))
