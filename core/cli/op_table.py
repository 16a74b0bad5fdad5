"""The work of ``opgraft ops list``, in a module that imports torch."""

from __future__ import annotations

import sys
from typing import Any

from opgraft.cli.output import echo, print_json, print_table, print_wrapped
from opgraft.ops import CustomOp
from opgraft.plugins.host import load_plugins
from opgraft.plugins.selection import current_platform
from opgraft.testing import inventory
from opgraft.testing.inventory import DeclaredPlatform, KernelHere


def print_ops(*, details: bool, as_json: bool) -> None:
    """Print every registered op. The exit code is 1 if an op has a conflict.

    Args:
        details: add the kernels per platform, and what was proved of each op.
        as_json: print JSON.
    """
    load_plugins()
    ops = dict(sorted(CustomOp.op_registry.items()))
    here = {}
    for op in ops.values():
        here[op] = inventory.kernel_here(op)
        for variant in inventory.variants_of(op):
            here[variant] = inventory.kernel_here(variant)
    errors = [row.error for row in here.values() if row.error]
    if as_json:
        _print_as_json(ops, here)
    else:
        _print_as_text(ops, here)
        if details:
            _print_details(ops)
        for error in dict.fromkeys(errors):
            print_wrapped(f"conflict: {error}")
    if errors:
        sys.exit(1)


def _print_as_text(ops: dict[str, type], here: dict[type, KernelHere]) -> None:
    print_wrapped(f"platform: {current_platform().name}")
    rows = []
    for name, op in ops.items():
        rows.append(_cells(name, op, here))
        for variant in inventory.variants_of(op):
            rows.append(_cells(name, variant, here))
    header = ("op", "class", "kernel", "provider", "reason")
    # Most machines have nothing to tell in the last column.
    has_reasons = any(row[-1] for row in rows)
    columns = len(header) if has_reasons else len(header) - 1
    print_table(header[:columns], [row[:columns] for row in rows])


def _cells(name: str, cls: type, here: dict[type, KernelHere]) -> tuple[str, ...]:
    row = here[cls]
    is_variant = CustomOp.op_registry[name] is not cls
    label = f"  {name}" if is_variant else name
    if row.error:
        return label, cls.__qualname__, inventory.CONFLICT, "", ""

    state = "" if row.enabled else ", disabled"
    kernel = f"{row.key}{state}"
    provider = row.provider.name if row.provider else ""
    return label, row.op_class or "", kernel, provider, row.reason or ""


def _print_details(ops: dict[str, type]) -> None:
    platforms = inventory.declared_platforms()
    for name, cls in ops.items():
        proof = inventory.proofs_of(inventory.functionals_of(cls))
        echo()
        print_wrapped(name)
        for each in (cls, *inventory.variants_of(cls)):
            keys = inventory.keys_in_words(inventory.kernel_keys(each, platforms))
            print_wrapped(f"  kernels of {each.__qualname__}: {keys}")
        print_wrapped(f"  {inventory.proofs_in_words(cls, proof)}")
    for platform in platforms:
        if platform.unknown:
            print_wrapped(f"{platform.name}=?: {platform.unknown}")


def _print_as_json(ops: dict[str, type], here: dict[type, KernelHere]) -> None:
    platforms = inventory.declared_platforms()
    unknown = {platform.name: platform.unknown for platform in platforms if platform.unknown}
    rows = [_op_as_dict(name, cls, here, platforms) for name, cls in ops.items()]
    data = {"platform": current_platform().name, "ops": rows, "unknown": unknown}
    print_json("opgraft.ops.list/2", data)


def _op_as_dict(
    name: str, op: type, here: dict[type, KernelHere], platforms: list[DeclaredPlatform]
) -> dict[str, Any]:
    def row(cls: type) -> dict[str, Any]:
        kernels = inventory.kernel_keys(cls, platforms)
        return {"target": cls.__qualname__, **here[cls].to_dict(), "kernels": kernels}

    forms = inventory.functionals_of(op)
    return {
        "op": name,
        **row(op),
        "variants": [row(cls) for cls in inventory.variants_of(op)],
        "forms": [form.name for form in forms],
        "proofs": inventory.proofs_of(forms),
    }
