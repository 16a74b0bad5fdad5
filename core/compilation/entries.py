"""Entries of the cache: what is written of a compiled model, by which a process has it again without tracing."""

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
from opgraft.compilation.inputs import Expected, Signature
from opgraft.compilation.lowering import lowerings_of
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
    except Exception as error:  # of a container that tells no name, whatever torch raises
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
    """Undo ``write_signature`` for an example that the graph was captured with, or one like it."""
    expected = tuple(
        Expected(
            name,
            getattr(torch, dtype.removeprefix("torch.")),
            torch.device(device),
            tuple(sizes),
            written,
        )
        for name, dtype, device, sizes, written in description["expected"]
    )
    in_spec = flattened((example.args, dict(example.kwargs)))[1]
    out_spec = structure_of_text(description["out_spec"])
    bounds = {name: (low, high) for name, (low, high) in description["bounds"].items()}
    inputs, constants, results = (description[name] for name in ("inputs", "constants", "results"))
    return Signature(
        tuple(inputs), dict(constants), in_spec, out_spec, expected, bounds, dict(results)
    )


def write_code(code: Code, name: str, folder: Path) -> dict[str, Any]:
    """Describe code that is in a package, and write the values of tensors that no model has to a folder."""
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
        CacheEntryError: a file is damaged, or the kernels or the model are not those that it was compiled for.
    """
    forms = description["forms"]
    lowerings = lowerings_of({name: count for name, (count, _) in forms.items()})
    for each in lowerings:
        chosen = forms[each.form.name][1]
        if each.chosen != chosen:
            raise CacheEntryError(
                f"the kernel of {each.form.name} was {chosen} and is {each.chosen}"
            )
    values: dict[str, Tensor] = {}
    if description["values"]:
        values = torch.load(folder / description["values"], weights_only=True)
    tensors, parts = tensors_of(model, description["origins"], values)
    reports = tuple(
        PassReport(name, source, matched, replaced, (before, after), tuple(left))
        for name, source, matched, replaced, (before, after), left in description["passes"]
    )
    run = loaded(packages.file_of(description["package"]), tensors)
    return Code(None, reports, lowerings, run, (*tensors.values(), *parts), tuple(parts))
