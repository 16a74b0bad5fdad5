"""The key of a compiled model in the cache: a digest of everything that decides on the code.

The key is found without tracing the model.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from opgraft.base.collector import without_collections
from opgraft.base.version import __version__
from opgraft.compat.graphs import changed_settings
from opgraft.compilation.description import Descriptions, held_by, layout, modules_of
from opgraft.compilation.example import Example
from opgraft.compilation.sources import Sources
from opgraft.config import CompilationConfig, OpgraftConfig
from opgraft.config.declaration import values_of
from opgraft.config.environment import read_compilers
from opgraft.distributed.groups import get_world_group, parallelism
from opgraft.plugins.selection import current_platform
from opgraft.registry.op_classes import qualified
from opgraft.registry.state import host_state
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
"""Settings of compilation without an effect on the code, except through other settings."""

_OF_CODE = ("versions", "platform", "threads", "compilers", "variables", "providers", "example")


class ModelKey(NamedTuple):
    """The key of a compiled model.

    Attributes:
        parts: data with equal texts in all processes with equal code.
        unseen: the classes of values in the model that have no description in the parts.
    """

    parts: Mapping[str, Any]
    unseen: frozenset[str]

    @property
    def name(self) -> str:
        """The name of the entry."""
        return digest(self.parts)

    @property
    def of_code(self) -> dict[str, Any]:
        """The parts that the code of a graph depends on, besides the graph."""
        # The example is one: the code fits its dtypes and its constant sizes.
        return {name: self.parts[name] for name in _OF_CODE}


@without_collections()
def key_of(
    model: nn.Module, example: Example, settings: CompilationConfig, sources: Sources
) -> ModelKey:
    """Return the key of a model.

    Args:
        model: the model to compile.
        example: the arguments of a call.
        settings: the settings of compilation. The passes of users have been imported.
        sources: digests of source files.
    """
    modules = modules_of(model)
    held = held_by(modules)
    descriptions = Descriptions(held)
    # Of an example, dtypes and sizes decide, and the numbers do not.
    without_contents = Descriptions(held, contents=False)
    described = list(_modules(modules, descriptions))
    call = (example.args, dict(example.kwargs), example.dynamic_shapes)
    parts = {
        **_decisions(settings, descriptions, sources),
        "model": described,
        "weights": list(_weights(modules)),
        "example": [without_contents.of(each) for each in call],
    }
    sources.keep()
    return ModelKey(parts, frozenset(descriptions.incomplete))


def origin_of_numbers(model: nn.Module, settings: CompilationConfig) -> dict[str, Any]:
    """Return versions, platform, settings of compilation, plugins, ranks and sources of a model.

    Together with the checkpoint and the settings of the model they decide on its numbers.

    Args:
        model: the model.
        settings: the settings of compilation.
    """
    descriptions = Descriptions({})
    descriptions.modules.update(type(each).__module__ for each in modules_of(model).values())
    return _decisions(settings, descriptions, Sources())


def _decisions(
    settings: CompilationConfig, descriptions: Descriptions, sources: Sources
) -> dict[str, Any]:
    """Return the parts of a key about versions, settings, plugins, ranks and sources."""
    passes = [_pass(each, descriptions) for each in settings.user_passes]
    names = descriptions.modules | {name.partition(":")[0] for name in _names_of_passes(settings)}
    return {
        **_process_parts(),
        "compilers": [
            torch.are_deterministic_algorithms_enabled(),
            torch.backends.mkldnn.enabled,
            Descriptions({}, contents=False).of(changed_settings()),
        ],
        "variables": read_compilers(),
        "settings": [*_settings_in_key(settings), passes, *_host_settings()],
        "providers": sorted(_providers(sources)),
        "ranks": [str(parallelism().layout), get_world_group().rank],
        "sources": sorted(sources.modules(names)),
    }


def _process_parts() -> dict[str, list[Any]]:
    """Return the parts of a key about this process: versions, platform and numbers of torch."""
    platform = current_platform()
    return {
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
    }


def digest(value: Any) -> str:
    """Return a name for data. Other data has another name."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:40]


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
    yield f"of_plugins={sorted(config.of_plugins.items())!r}"


def _providers(sources: Sources) -> Iterator[str]:
    """Yield the providers of kernels here, each with the digest of the package."""
    state = host_state()
    yield f"opgraft: {sources.package('opgraft')}"
    for plugin in state.plugins.values():
        yield f"plugin {plugin.name} {plugin.provider} {plugin.status.value}"
    for replacement in state.active:
        package = replacement.cls.__module__.partition(".")[0]
        yield f"{qualified(replacement.cls)}: {sources.package(package)}"


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
    # These belong to a process, or follow from the places of weights in memory.
    *("_packed", "_joint", "_beside", "_choice", "_binding"),
    # Grafting keeps the former class here.
    "_opgraft_original",
    # No forward of transformers reads this, and its hash differs from process to process.
    "generation_config",
}
"""Attributes of modules that are no part of a key."""


def _weights(modules: Mapping[str, nn.Module]) -> Iterator[list[Any]]:
    """Yield the layout of each parameter and buffer, with a number for the shared memory."""
    storages: dict[int, int] = {}
    for path, module in modules.items():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                storage = tensor.untyped_storage().data_ptr()
                place = storages.setdefault(storage, len(storages))
                yield [path, name, *layout(tensor), place, tensor.storage_offset()]
        packed = vars(module).get("_packed")
        if packed is not None:
            yield [path, "packed", packed.rows, packed.columns, str(packed.dtype)]
