"""The key of what is compiled: everything that decides on it, found without tracing."""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from opgraft.compilation.capture import Example
from opgraft.config import CompilationConfig, OpgraftConfig
from opgraft.config.declaration import values_of
from opgraft.environment import read_compilers
from opgraft.plugins.selection import current_platform
from opgraft.registry.op_classes import qualified
from opgraft.state import host_state
from opgraft.version import __version__
from torch import Tensor, nn

_OF_THE_CACHE = ("cache", "cache_folder", "cache_bytes", "dump_graphs", "level")
"""Settings of compilation that do not change what is compiled, or change it through others."""

OF_CODE = ("versions", "platform", "threads", "variables", "providers")
"""The parts on which the code of a graph depends, besides the graph."""

_HASH = "_hash"
"""The end of names under which objects keep what ``hash`` gives, as generation configs do: Python salts it anew in each
process, and what it is of is described itself."""

_SOURCES = (".py", ".so", ".cpp", ".h")
_DEPTH = 6
"""Levels of objects within objects among the attributes of a module that are looked at."""


def parts_of(model: nn.Module, example: Example, settings: CompilationConfig) -> dict[str, Any]:
    """Return the parts of the key: data whose text is the same in every process in which the same would be compiled.

    Args:
        model: to be compiled.
        example: of its arguments.
        settings: under which it is.
    """
    platform = current_platform()
    return {
        "versions": [__version__, torch.__version__, torch.version.git_version, sys.version],
        "platform": [platform.name, str(platform.capability()), torch.backends.cpu.get_cpu_capability()],
        "threads": [torch.get_num_threads(), torch.get_float32_matmul_precision(), str(torch.get_default_dtype())],
        "variables": read_compilers(),
        "settings": [*_settings(settings), *_host_settings()],
        "providers": sorted(_providers()),
        "model": list(_modules(model)),
        "sources": sorted(_sources(model, settings)),
        "weights": list(_weights(model)),
        "example": [_described(example.args), _described(dict(example.kwargs)), _described(example.dynamic_shapes)],
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
    yield f"opgraft: {_package('opgraft')}"
    for plugin in state.plugins.values():
        yield f"plugin {plugin.name} {plugin.provider} {plugin.status.value}"
    for replacement in state.active:
        yield f"{qualified(replacement.cls)}: {_package(replacement.cls.__module__.partition('.')[0])}"


def _package(name: str) -> str:
    """Digest the sources of an imported package, or of a module that stands alone."""
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    folders = list(getattr(module, "__path__", ()))
    files = [Path(file)] if file and not folders else []
    for folder in map(Path, folders):
        files += sorted(path for path in folder.rglob("*") if path.suffix in _SOURCES)
    return hashlib.sha256("".join(map(_file, map(str, files))).encode()).hexdigest()


def _file(path: str) -> str:
    try:
        found = Path(path).stat()
    except OSError:
        return "absent"
    return _digest_of_file(path, found.st_size, found.st_mtime_ns)


@functools.cache
def _digest_of_file(path: str, size: int, changed: int) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _sources(model: nn.Module, settings: CompilationConfig) -> Iterator[str]:
    """Yield the files of the model's classes and of the user's passes, and the version of the package of each."""
    names = {kind.__module__ for module in model.modules() for kind in type(module).__mro__}
    names |= {name.partition(":")[0] for name in settings.user_passes}
    for name in names:
        top = name.partition(".")[0]
        if top not in ("opgraft", "torch", "builtins"):  # of which the versions, or all sources, are in the key
            module = sys.modules.get(name)
            version = getattr(sys.modules.get(top), "__version__", "")
            yield f"{name} {version} {_file(str(getattr(module, '__file__', None)))}"


def _modules(model: nn.Module) -> Iterator[list[Any]]:
    for path, module in model.named_modules(remove_duplicate=False):
        own = {name: value for name, value in vars(module).items() if name not in _NOT_OF_MODULES}
        yield [path, qualified(type(module)), _described(own)]


_NOT_OF_MODULES = {*vars(nn.Module()), "_packed", "_beside", "_choice", "binding"} - {"training"}


def _weights(model: nn.Module) -> Iterator[list[Any]]:
    """Yield the layout of parameters and buffers, and which of them share memory."""
    storages: dict[int, int] = {}
    for path, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                place = storages.setdefault(tensor.untyped_storage().data_ptr(), len(storages))
                yield [path, name, *_layout(tensor), place, tensor.storage_offset()]
        packed = vars(module).get("_packed")
        if packed is not None:
            yield [path, "packed", packed.rows, packed.columns, str(packed.dtype)]


def _layout(tensor: Tensor) -> list[Any]:
    return [str(tensor.dtype), str(tensor.device), list(tensor.shape), list(tensor.stride())]


def _described(value: Any, depth: int = _DEPTH) -> Any:
    """Describe data: what a graph may depend on, and nothing that differs from process to process."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value if value == value else "nan"
    if isinstance(value, (torch.dtype, torch.device, bytes, complex)):
        return repr(value)
    if isinstance(value, nn.Module):
        return qualified(type(value))  # described where it stands in the model
    if isinstance(value, Tensor):
        return _layout(value)
    if isinstance(value, (type, FunctionType, MethodType)):
        limits = [str(getattr(value, name, "")) for name in ("min", "max")]  # of sizes, for torch.export
        return [qualified(value), _code(value), *limits]
    if depth == 0:
        return qualified(type(value))
    if isinstance(value, Mapping):
        return sorted([str(key), _described(each, depth - 1)] for key, each in value.items())
    if isinstance(value, Iterable) and hasattr(value, "__len__"):
        items = [_described(each, depth - 1) for each in value]
        return sorted(items, key=repr) if isinstance(value, (set, frozenset)) else items
    known = vars(value) if hasattr(value, "__dict__") and not _is_ours(type(value)) else {}
    own = {name: each for name, each in known.items() if not name.endswith(_HASH)}
    return [qualified(type(value)), _described(own, depth - 1)]


def _is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("opgraft", "torch")


def _code(value: Any) -> str:
    """Digest the code of a function; empty for what has none."""
    code = getattr(value, "__code__", None)
    return "" if code is None else hashlib.sha256("".join(_instructions(code)).encode()).hexdigest()


def _instructions(code: CodeType) -> Iterator[str]:
    yield code.co_code.hex()
    yield repr(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _instructions(constant)
        else:  # sets have an order of their own in each process
            yield repr(sorted(constant, key=repr) if isinstance(constant, frozenset) else constant)
