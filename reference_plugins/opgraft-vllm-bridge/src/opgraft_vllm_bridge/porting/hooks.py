"""The files that a port adds: two modules for opgraft's entry points, and the guide to what is left to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from opgraft.plugins.bridges import Uncovered

_DEVICE = '''"""Finding the device, by the function that vLLM called. Written by 'opgraft new --from-vllm'."""

from opgraft import Evidence, Machine, PlatformSpec

from {module} import {function}


def probe(machine: Machine) -> Evidence:
    """Ask the function, which returns the path of a class where the device is there."""
    path = {function}()
    if path is None:
        return Evidence(False, "{module}:{function} finds no device")
    return Evidence(True, f"{module}:{function} returns {{path}}")


SPEC = PlatformSpec(probe=probe, platform_class="{platform}")
'''

_PLUGIN = '''"""The plugin's hooks, by the functions that vLLM called. Written by 'opgraft new --from-vllm'."""

import opgraft

{imports}
{scope}

@opgraft.hookimpl
def opgraft_register_ops() -> None:
    """Register what the plugin brings."""
{calls}
'''

_GUIDE = """# What is left to port

This is a copy of a vLLM plugin, written by `opgraft new --from-vllm`: imports are those of opgraft's counterparts, and
its entry points are opgraft's. The package keeps its name, so that it takes the place of the original where it is
installed: keep both apart.

| entry point | |
|---|---|
{points}

Install it, and let opgraft judge it:

    pip install -e .
    opgraft plugins doctor
    opgraft plugins check {name}

## Without a counterpart

{uncovered}

## Look at

- `memory` of the platform says that all memory is free, as vLLM's platforms tell only the total.
- `opgraft_device.py` imports the plugin's package: a probe should import no torch.
- vLLM's `check_and_update_config` is `default_config`, and its choice of attention backends a replacement of
  `opgraft.ops.Attention`.
- A replacement takes every call that its target takes. `opgraft plugins check` names those that do not.
"""


def device_module(module: str, function: str, platform: str) -> str:
    """Return the module of the platform's entry point."""
    return _DEVICE.format(module=module, function=function, platform=platform)


def plugin_module(functions: Sequence[tuple[str, str]], scoped: bool) -> str:
    """Return the module of the plugin's entry point, which calls functions of modules.

    Args:
        functions: modules and names.
        scoped: the plugin has a platform of its own, and applies there only.
    """
    names = [
        f"{function}_{index}" if index else function
        for index, (_, function) in enumerate(functions)
    ]
    imports = [
        f"from {module} import {function}" + (f" as {name}" if name != function else "")
        for (module, function), name in zip(functions, names, strict=True)
    ]
    return _PLUGIN.format(
        imports="\n".join(imports),
        scope="" if scoped else '\nplatforms = "any"\n',
        calls="\n".join(f"    {name}()" for name in names),
    )


def guide(
    name: str, groups: Mapping[str, Mapping[str, str]], uncovered: Iterable[Uncovered]
) -> str:
    """Return the text of ``PORTING.md``."""
    points = [
        f"| `{group}` | `{key} = {value}` |"
        for group, entries in groups.items()
        for key, value in entries.items()
    ]
    rows = [
        f"| `{_cell(one.file)}:{one.line}` | `{_cell(one.name)}` | {_cell(one.hint)} |"
        for one in uncovered
    ]
    head = [
        "Code stands below a comment `# opgraft: no counterpart`, an import in it; requirements are as they were.",
        "Lines are those of the original.",
        "",
        "| where | what | |",
        "|---|---|---|",
    ]
    table = "\n".join([*head, *rows]) if rows else "Nothing."
    return _GUIDE.format(points="\n".join(points), name=name, uncovered=table)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("`", "'")
