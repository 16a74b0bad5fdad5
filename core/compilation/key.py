"""The key of what is compiled: everything that decides on it, found without tracing."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from opgraft.compat.graphs import changed_settings
from opgraft.compilation.description import Descriptions, held_by, layout, modules_of
from opgraft.compilation.example import Example
from opgraft.compilation.sources import Sources
from opgraft.config import CompilationConfig, OpgraftConfig
from opgraft.config.declaration import values_of
from opgraft.config.environment import read_compilers
from opgraft.distributed.groups import get_world_group, parallelism
from opgraft.machine.memory import without_collections
from opgraft.plugins.selection import current_platform
from opgraft.registry.op_classes import qualified
from opgraft.registry.state import host_state
from opgraft.version import __version__
from torch import nn

_OF_THE_CACHE = (
    "cache",
    "cache_folder",
    "cache_bytes",
    "cache_remote",
    "cache_key",
    "dump_graphs",
    "level",
)
"""Settings of compilation that do not change what is compiled, or change it through others."""

_OF_CODE = ("versions", "platform", "threads", "compilers", "variables", "providers", "example")


class Key(NamedTuple):
    """The key of what is compiled.

    Attributes:
        parts: data whose text is the same in every process in which the same would be compiled.
        unseen: classes of which the model has something that is not in the parts, as it cannot be described.
    """

    parts: Mapping[str, Any]
    unseen: frozenset[str]

    @property
    def name(self) -> str:
        """The name of the entry."""
        return digest(self.parts)

    @property
    def of_code(self) -> dict[str, Any]:
        """The parts on which the code of a graph depends, besides the graph: by the example, the sizes it is for."""
        return {name: self.parts[name] for name in _OF_CODE}


@without_collections()
def key_of(
    model: nn.Module, example: Example, settings: CompilationConfig, sources: Sources
) -> Key:
    """Return the key of a model.

    Args:
        model: to be compiled.
        example: of its arguments.
        settings: under which it is; passes that they name have been imported.
        sources: of the code that decides.
    """
    platform, modules = current_platform(), modules_of(model)
    held = held_by(modules)
    descriptions, given = Descriptions(held), Descriptions(held, contents=False)
    described = list(_modules(modules, descriptions))
    passes = [_pass(each, descriptions) for each in settings.user_passes]
    names = descriptions.modules | {name.partition(":")[0] for name in _names_of_passes(settings)}
    parts = {
        "versions": [__version__, torch.__version__, torch.version.git_version, sys.version],
        "platform": [
            platform.name,
            str(platform.capability()),
            torch.backends.cpu.get_cpu_capability(),
        ],
        "threads": [
            torch.get_num_threads(),
            torch.get_float32_matmul_precision(),
            str(torch.get_default_dtype()),
        ],
        "compilers": [
            *(torch.are_deterministic_algorithms_enabled(), torch.backends.mkldnn.enabled),
            given.of(changed_settings()),
        ],
        "variables": read_compilers(),
        "settings": [*_settings_in_key(settings), passes, *_host_settings()],
        "providers": sorted(_providers(sources)),
        "ranks": [str(parallelism().layout), get_world_group().rank],
        "model": described,
        "sources": sorted(sources.modules(names)),
        "weights": list(_weights(modules)),
        "example": [
            given.of(each) for each in (example.args, dict(example.kwargs), example.dynamic_shapes)
        ],
    }
    sources.keep()
    return Key(parts, frozenset(descriptions.incomplete))


def digest(value: Any) -> str:
    """Return a name for data that other data has not."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:40]


def _names_of_passes(settings: CompilationConfig) -> Iterator[str]:
    yield from (each for each in settings.user_passes if isinstance(each, str))


def _pass(given: Any, descriptions: Descriptions) -> Any:
    """Describe a pass of the user: a name, a class, or an object with class and state."""
    if isinstance(given, (str, type)):
        return descriptions.of(given)
    return [descriptions.of(type(given)), descriptions.of(given)]


def _settings_in_key(settings: CompilationConfig) -> Iterator[str]:
    for field, value in values_of(settings):
        name = field.name.rpartition(".")[2]
        if name not in _OF_THE_CACHE and name != "user_passes":
            yield f"{field.name}={value!r}"


def _host_settings() -> Iterator[str]:
    config: OpgraftConfig = host_state().shared_settings().config
    yield f"providers={sorted((config.providers or {}).items())!r}"
    yield f"check_values={config.check_values!r}"
    yield f"shadow={config.shadow!r}"


def _providers(sources: Sources) -> Iterator[str]:
    """Yield what provides kernels here, each with the digest of its package."""
    state = host_state()
    yield f"opgraft: {sources.package('opgraft')}"
    for plugin in state.plugins.values():
        yield f"plugin {plugin.name} {plugin.provider} {plugin.status.value}"
    for replacement in state.active:
        yield f"{qualified(replacement.cls)}: {sources.package(replacement.cls.__module__.partition('.')[0])}"


def _modules(modules: Mapping[str, nn.Module], descriptions: Descriptions) -> Iterator[list[Any]]:
    for path, module in modules.items():
        held = vars(module)
        own = {name: held[name] for name in held.keys() - _NOT_OF_MODULES}
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        yield [
            path,
            descriptions.of(type(module)),
            descriptions.of(own),
            hooks and descriptions.of(hooks),
        ]


_NOT_OF_MODULES = {
    *(vars(nn.Module()).keys() - {"training"}),
    *("_packed", "_joint", "_beside", "_choice", "_binding"),  # of a process, or as the weights lie
    "_opgraft_original",  # what grafting has replaced
    "generation_config",  # of transformers: no forward reads it, and it has a hash that each process has another of
}


def _weights(modules: Mapping[str, nn.Module]) -> Iterator[list[Any]]:
    """Yield the layout of parameters and buffers, and which of them share memory."""
    storages: dict[int, int] = {}
    for path, module in modules.items():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                place = storages.setdefault(tensor.untyped_storage().data_ptr(), len(storages))
                yield [path, name, *layout(tensor), place, tensor.storage_offset()]
        packed = vars(module).get("_packed")
        if packed is not None:
            yield [path, "packed", packed.rows, packed.columns, str(packed.dtype)]
