"""The files that a port adds: two modules for opgraft's entry points, and a guide to the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from opgraft.plugins.bridges import Uncovered

_DEVICE = '''"""Find the device, by the function that vLLM called.

Written by 'opgraft new --from-vllm'.
"""

from opgraft import Evidence, Machine, PlatformSpec

from {module} import {function}


def probe(machine: Machine) -> Evidence:
    """Ask the function. It returns the path of a class if the device is there."""
    path = {function}()
    if path is None:
        return Evidence(False, "{module}:{function} finds no device")
    return Evidence(True, f"{module}:{function} returns {{path}}")


SPEC = PlatformSpec(probe=probe, platform_class="{platform}")
'''

_PLUGIN = '''"""The plugin's hooks. They call the functions that vLLM called.

Written by 'opgraft new --from-vllm'.
"""

import opgraft

{imports}
{scope}

@opgraft.hookimpl
def opgraft_register_ops() -> None:
    """Register the plugin's kernels."""
{calls}
'''

_GUIDE = """# What is left to port

This is a copy of a vLLM plugin, written by `opgraft new --from-vllm`. It imports opgraft's
counterparts of vLLM's names, and has opgraft's entry points. The package keeps its name: if you
install it, it replaces the original. Keep both apart.

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

- `memory` of the platform reports all memory as free, because vLLM's platforms know the total only.
- `opgraft_device.py` imports the plugin's package. A probe should import no torch.
- `default_config` of opgraft is vLLM's `check_and_update_config`. A choice of attention backends
  becomes a replacement of `opgraft.ops.Attention`.
- A replacement must take every call of its target. `opgraft plugins check` names replacements that
  do not.
"""


_TABLE_HEAD = (
    "Such code stands below a comment `# opgraft: no counterpart`. Such an import is a comment",
    "itself. Requirements are unchanged. Line numbers are those of the original.",
    "",
    "| where | what | |",
    "|---|---|---|",
)


def device_module(module: str, function: str, platform: str) -> str:
    """Return the module of the platform's entry point."""
    return _DEVICE.format(module=module, function=function, platform=platform)


def plugin_module(functions: Sequence[tuple[str, str]], scoped: bool) -> str:
    """Return the module of the plugin's entry point.

    Args:
        functions: the functions to call, each as module and name.
        scoped: whether the plugin has a platform of its own, and applies there only.
    """
    imports = []
    names = []
    for index, (module, function) in enumerate(functions):
        # Two functions may have the same name.
        name = f"{function}_{index}" if index else function
        alias = f" as {name}" if index else ""
        imports.append(f"from {module} import {function}{alias}")
        names.append(name)
    return _PLUGIN.format(
        imports="\n".join(imports),
        scope="" if scoped else '\nplatforms = "any"\n',
        calls="\n".join(f"    {name}()" for name in names),
    )


def guide(
    name: str, groups: Mapping[str, Mapping[str, str]], uncovered: Iterable[Uncovered]
) -> str:
    """Return the text of ``PORTING.md``."""
    points = []
    for group, entries in groups.items():
        for key, value in entries.items():
            points.append(f"| `{group}` | `{key} = {value}` |")
    rows = [
        f"| `{_cell(one.file)}:{one.line}` | `{_cell(one.name)}` | {_cell(one.hint)} |"
        for one in uncovered
    ]
    table = "\n".join([*_TABLE_HEAD, *rows]) if rows else "Nothing."
    return _GUIDE.format(points="\n".join(points), name=name, uncovered=table)


def _cell(text: str) -> str:
    """Return a text as a cell of a table in Markdown."""
    return text.replace("|", "\\|").replace("\n", " ").replace("`", "'")
