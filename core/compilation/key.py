"""The key of what is compiled: everything that decides on it, found without tracing."""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
from opgraft.compat.graphs import changed_settings
from opgraft.compilation.capture import Example
from opgraft.compilation.description import Descriptions, code_digest, layout
from opgraft.config import CompilationConfig, OpgraftConfig
from opgraft.config.declaration import values_of
from opgraft.distributed.groups import get_world_group, parallelism
from opgraft.environment import read_compilers
from opgraft.plugins.selection import current_platform
from opgraft.registry.op_classes import qualified
from opgraft.state import host_state
from opgraft.version import __version__
from torch import nn

_OF_THE_CACHE = ("cache", "cache_folder", "cache_bytes", "dump_graphs", "level")
"""Settings of compilation that do not change what is compiled, or change it through others."""

OF_CODE = ("versions", "platform", "threads", "compilers", "variables", "providers", "example")
"""The parts on which the code of a graph depends, besides the graph: by the example, the sizes that it is for."""

_SOURCES = (".py", ".so", ".cpp", ".h")


def parts_of(model: nn.Module, example: Example, settings: CompilationConfig) -> dict[str, Any]:
    """Return the parts of the key: data whose text is the same in every process in which the same would be compiled.

    Args:
        model: to be compiled.
        example: of its arguments.
        settings: under which it is; passes that they name have been imported.
    """
    platform, descriptions = current_platform(), Descriptions(model)
    modules = list(_modules(model, descriptions))
    names = descriptions.modules | {name.partition(":")[0] for name in settings.user_passes}
    given = Descriptions(model, contents=False)
    return {
        "versions": [__version__, torch.__version__, torch.version.git_version, sys.version],
        "platform": [platform.name, str(platform.capability()), torch.backends.cpu.get_cpu_capability()],
        "threads": [torch.get_num_threads(), torch.get_float32_matmul_precision(), str(torch.get_default_dtype())],
        "compilers": [
            *(torch.are_deterministic_algorithms_enabled(), torch.backends.mkldnn.enabled),
            given.of(changed_settings()),
        ],
        "variables": read_compilers(),
        "settings": [*_settings(settings), *_host_settings()],
        "providers": sorted(_providers()),
        "ranks": [str(parallelism().layout), get_world_group().rank],
        "model": modules,
        "sources": sorted(_sources(names)),
        "weights": list(_weights(model)),
        "example": [given.of(each) for each in (example.args, dict(example.kwargs), example.dynamic_shapes)],
    }


def digest(value: Any) -> str:
    """Return a name for data that other data has not."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:40]


def _settings(settings: CompilationConfig) -> Iterator[str]:
    for field, value in values_of(settings):
        if field.name.rpartition(".")[2] not in _OF_THE_CACHE:
            yield f"{field.name}={value!r}"


def _host_settings() -> Iterator[str]:
    config: OpgraftConfig = host_state().settings().config
    yield f"providers={sorted((config.providers or {}).items())!r}"
    yield f"check_values={config.check_values!r}"


def _providers() -> Iterator[str]:
    """Yield what provides kernels here, each with the digest of its package."""
    state = host_state()
    yield f"opgraft: {package_digest('opgraft')}"
    for plugin in state.plugins.values():
        yield f"plugin {plugin.name} {plugin.provider} {plugin.status.value}"
    for replacement in state.active:
        yield f"{qualified(replacement.cls)}: {package_digest(replacement.cls.__module__.partition('.')[0])}"


def package_digest(name: str) -> str:
    """Digest the sources of an imported package, or of a module that stands alone."""
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    folders = list(getattr(module, "__path__", ()))
    files = [Path(file)] if file and not folders else []
    for folder in map(Path, folders):
        files += sorted(path for path in folder.rglob("*") if path.suffix in _SOURCES)
    found = [_file(str(path)) for path in files] if files else sorted(_codes(module))
    return hashlib.sha256("".join(found).encode()).hexdigest()


def _file(path: str) -> str:
    try:
        found = Path(path).stat()
    except OSError:
        return "absent"
    return _digest_of_file(path, found.st_size, found.st_mtime_ns)


@functools.cache
def _digest_of_file(path: str, size: int, changed: int) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _sources(names: Iterable[str]) -> Iterator[str]:
    """Yield the files of modules, each with the version of its package, and of those that they name.

    Those of torch and opgraft, of which the versions or all sources are in the key, are left out. Of an installed
    package the version stands for what its modules name.
    """
    pending, seen = [*names], set[str]()
    while pending:
        name = pending.pop()
        package, module = name.partition(".")[0], sys.modules.get(name)
        if name in seen or package in _COVERED or module is None:
            continue
        seen.add(name)
        file, version = getattr(module, "__file__", None), getattr(sys.modules.get(package), "__version__", "")
        yield f"{name} {version} {_file(file) if file else sorted(_codes(module))}"
        if not file or not _INSTALLED & {*Path(file).parts}:
            pending += _named(module)


_COVERED = {"opgraft", "torch", *sys.stdlib_module_names} - {"__main__"}
_INSTALLED = {"site-packages", "dist-packages"}


def _named(module: Any) -> Iterator[str]:
    """Yield the modules that a module names, and those of what it names."""
    for value in list(vars(module).values()):
        name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        if isinstance(name, str):
            yield name


def _codes(module: Any) -> Iterator[str]:
    """Yield digests of the functions of a module that has no file, as that of a notebook."""
    values = list(vars(module).values()) if module else []
    found = [value for value in values if getattr(value, "__module__", None) == module.__name__]
    functions = [each for value in found for each in (vars(value).values() if isinstance(value, type) else (value,))]
    yield from (code_digest(each.__code__) for each in functions if isinstance(each, FunctionType))


def _modules(model: nn.Module, descriptions: Descriptions) -> Iterator[list[Any]]:
    for path, module in model.named_modules(remove_duplicate=False):
        own = {name: value for name, value in vars(module).items() if name not in _NOT_OF_MODULES}
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        descriptions.modules.update(kind.__module__ for kind in type(module).__mro__)
        yield [path, qualified(type(module)), descriptions.of(own), descriptions.of(hooks)]


_NOT_OF_MODULES = {
    *(vars(nn.Module()).keys() - {"training"}),
    *("_packed", "_joint", "_beside", "_choice", "_binding"),  # of a process, or as the weights lie
    "generation_config",  # of transformers: no forward reads it, and it has a hash that each process has another of
}


def _weights(model: nn.Module) -> Iterator[list[Any]]:
    """Yield the layout of parameters and buffers, and which of them share memory."""
    storages: dict[int, int] = {}
    for path, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                place = storages.setdefault(tensor.untyped_storage().data_ptr(), len(storages))
                yield [path, name, *layout(tensor), place, tensor.storage_offset()]
        packed = vars(module).get("_packed")
        if packed is not None:
            yield [path, "packed", packed.rows, packed.columns, str(packed.dtype)]
