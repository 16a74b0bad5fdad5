"""From a configuration to a model with its weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from opgraft.base.collector import without_collections
from opgraft.base.log import logger
from opgraft.base.text import described, printable
from opgraft.binding.provenance import plugins_named
from opgraft.config import OpgraftConfig, ParallelConfig
from opgraft.config.environment import PLATFORM
from opgraft.config.sections import DTYPES
from opgraft.distributed.groups import get_pp_group, parallelism
from opgraft.errors import (
    CheckpointError,
    ConfigError,
    DistributedError,
    ModelError,
    OpgraftError,
    PluginError,
)
from opgraft.machine.memory import move_to_huge_pages
from opgraft.models.config import read_config
from opgraft.models.construction import construct, is_older
from opgraft.models.description import part, quantization_config
from opgraft.models.files import Weights, open_weights, opened_once
from opgraft.models.lazy import LazyTensor
from opgraft.models.load import load_weights
from opgraft.models.mapped import addresses_of
from opgraft.models.model import HasLogits, Model, model_class
from opgraft.models.names import CACHE_SCALES, is_ignored
from opgraft.plugins.device_types import why_unusable
from opgraft.plugins.discovery import HOST_DISTRIBUTION
from opgraft.plugins.selection import current_platform, selected_platform
from opgraft.quantization.settings import expect_patterns_used
from opgraft.registry.op_classes import location_of


@opened_once()
@without_collections()
@plugins_named()
def load_model(opgraft_config: OpgraftConfig) -> Model:
    """Construct the model of ``opgraft_config.model`` and load the checkpoint.

    Each rank has a shard. Constructors of the classes share the checkpoint that is opened here.

    Raises:
        ModelError: no model is named, no class is registered for the architecture, or the config
            does not describe a model of the class or the embedding in the checkpoint.
        CheckpointError: the checkpoint is damaged, or the weights do not fit the config.
        QuantizationError: the quantization of the checkpoint, or of the settings, cannot be used.
        DistributedError: a size of ``parallel`` is more than 1 and not the number of ranks of this
            process's group, or there are several pipeline stages and the model is not cut.
        ConfigError: torch cannot use the device ``load.device``.
        PluginError: code of a plugin raised, such as the constructor of a replaced op.
    """
    resolved = opgraft_config.resolved()
    name = _name_of_model(resolved)
    # Cheap checks come first: to construct a large model takes minutes.
    _expect_ranks(resolved.parallel)
    weights = open_weights(name)
    _expect_format(resolved.load.format, weights)
    device = _usable_device(resolved.load.device or current_platform().device_type)
    model = _constructed(resolved, weights, device)
    loaded = load_weights(
        model,
        weights.tensors,
        mapper=model.weights_mapper,
        ignored=model.ignored_weights,
        progress=bool(resolved.load.progress),
    )
    _tell_of_scales(name, loaded.ignored)
    move_to_huge_pages(addresses_of(model))
    return model.eval()


@plugins_named()
def describe_model(opgraft_config: OpgraftConfig) -> Model:
    """Construct this rank's shard of the model as ``load_model`` does, without memory or weights.

    The checkpoint may be a folder with a ``config.json`` alone.

    Raises:
        ModelError, CheckpointError, QuantizationError, DistributedError: as ``load_model``.
    """
    resolved = opgraft_config.resolved()
    name = _name_of_model(resolved)
    _expect_ranks(resolved.parallel)
    with opened_once(config_only=True):
        weights = open_weights(name)
        # Tensors on the device "meta" have shapes, and no memory.
        return _constructed(resolved, weights, torch.device("meta")).eval()


def _constructed(resolved: OpgraftConfig, weights: Weights, device: torch.device) -> Model:
    cls, config = _class_of(resolved, weights)
    _expect_stages(cls)
    _expect_embedding(cls, config, weights.tensors)
    dtype = dtype_of(resolved, config)
    # A config without a dtype says nothing of the weights.
    is_stated = getattr(config, "dtype", None) is dtype
    # A dtype that the user asks for stays, even if the device is slow with it.
    if is_stated and resolved.model.dtype in (None, "auto"):
        dtype = _computed_dtype(dtype, device)
    with _default_dtype_and_device(dtype, device):
        others = {}
        if is_older(cls):
            others = {"config": config, "quant_config": quantization_config(resolved, cls)}
        model = construct(cls, opgraft_config=resolved, **others)
    # Only the whole model shows that a pattern of the settings matches no layer.
    expect_patterns_used(model)
    return model


def generates(opgraft_config: OpgraftConfig) -> bool:
    """Return True if the named model has logits. A model without logits is an encoder.

    Raises:
        ModelError: no model is named, or no class is registered for the architecture.
        CheckpointError: the checkpoint is damaged, or is an encoder with a decoder.
    """
    resolved = opgraft_config.resolved()
    weights = open_weights(_name_of_model(resolved))
    cls, _ = _class_of(resolved, weights)
    return issubclass(cls, HasLogits)


def _tell_of_scales(name: str, ignored: Sequence[str]) -> None:
    """Log that scales for a cache are not read, if the checkpoint has any."""
    scales = [each for each in ignored if is_ignored(each, CACHE_SCALES)]
    if scales:
        logger.info(
            "%s has %d scales for the cache, such as %s, which are not read: with cache.dtype fp8 "
            "or int8 each row of the cache has its own, and without there are none",
            printable(name),
            len(scales),
            printable(scales[0][:200]),
        )


def _name_of_model(resolved: OpgraftConfig) -> str:
    if resolved.model.name is None:
        raise ModelError(
            "no model is named: set model.name to a checkpoint's folder or file, or to a name"
        )
    return resolved.model.name


def _class_of(resolved: OpgraftConfig, weights: Weights) -> tuple[type[Model], Any]:
    """Return the class of the model, and a config that the class can read."""
    # transformers is imported only if the class needs a config of transformers.
    plain = resolved.model.part is None and resolved.model.implementation != "transformers"
    config = part(read_config(weights, plain=plain), resolved.model.part)
    if getattr(config, "is_encoder_decoder", False):
        raise CheckpointError(
            f"{weights.path} is an encoder with a decoder ({config.model_type}), which no model "
            "here is: give an encoder or a causal language model, or call opgraft.graft() in a "
            "program of your own"
        )
    architectures = getattr(config, "architectures", None) or ()
    cls = model_class(architectures, resolved.model.implementation or "auto")
    # The class is known by the plain config, and may need more than such a config has.
    if plain and not cls.plain_config:
        config = read_config(weights)
    return cls, config


def _expect_ranks(parallel: ParallelConfig) -> None:
    groups = parallelism().groups
    for kind in ("tensor", "pipeline", "data", "expert"):
        size = getattr(parallel, kind)
        ranks = groups[kind].world_size
        # An engine with its own experts has the size of all engines and one rank.
        is_alone = kind == "data" and parallel.data_rank is not None and ranks == 1
        # 1 is the default, beside ranks that another program has started.
        if size not in (1, ranks) and not is_alone:
            raise DistributedError(
                f"parallel.{kind} is {size}, and the {kind} group of this process has {ranks}: "
                "call opgraft.distributed.init_distributed on every rank before a model is made, "
                "or take the setting out"
            )


def _expect_stages(cls: type[Model]) -> None:
    stages = get_pp_group().world_size
    if stages > 1 and not cls.stage_streams:
        raise DistributedError(
            f"the pipeline has {stages} stages, and {cls.__name__} is not cut into any: every rank "
            "would have all layers. Use parallel.tensor"
        )


def device_named(name: str) -> torch.device:
    """Return the device of a name, such as ``load.device``.

    Raises:
        ConfigError: torch knows no device of that name.
    """
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise _unusable(name, error) from error


def _usable_device(name: str) -> torch.device:
    device = device_named(name)
    error = why_unusable(name)
    if error is not None:
        raise _unusable(name, error) from error
    return device


def _unusable(name: str, error: Exception) -> OpgraftError:
    """Make the error for a device that torch cannot use.

    If a plugin brings the platform and torch can use none of its devices, the error blames the
    plugin.
    """
    selection = selected_platform()
    platform = selection.platform
    provider = selection.provider
    device_type = platform.device_type
    # The name may have a number, such as "npu:1".
    is_own = name.partition(":")[0] == device_type
    of_plugin = provider is not None and provider.name != HOST_DISTRIBUTION
    # If the device without a number is usable, the number is wrong, and not the plugin.
    if is_own and of_plugin and why_unusable(device_type) is not None:
        place = location_of(type(platform))
        return PluginError(
            f"platform {platform.name!r} of {provider}: torch cannot use its device_type "
            f"{device_type!r} here: {described(error)}, at {place}. Correct the name, import what "
            f"makes it known to torch, or choose another platform by {PLATFORM}.",
            place,
        )
    return ConfigError(
        f"load.device is {name!r:.80}, which torch cannot use here: take it out for the "
        f"platform's, or give one such as cpu. {described(error)}"
    )


def _expect_embedding(cls: type[Model], config: Any, tensors: Mapping[str, LazyTensor]) -> None:
    """Compare the config's sizes with the embedding in the checkpoint, before memory is allocated.

    Raises:
        ModelError: the sizes differ.
    """
    wanted = cls.embedding_weight
    names = [name for name in tensors if wanted and wanted in cls.weights_mapper.spellings(name)]
    found = tensors[names[0]] if names else None
    # A quantized embedding may have another shape.
    if found is None or not found.dtype.is_floating_point:
        return
    vocab_size = getattr(config, "vocab_size", None)
    hidden_size = getattr(config, "hidden_size", None)
    if tuple(found.shape) != (vocab_size, hidden_size):
        raise ModelError(
            f"{wanted} has the shape {list(found.shape)} in the checkpoint, and its config says "
            f"vocab_size {vocab_size!r:.40} and hidden_size {hidden_size!r:.40}: take the config "
            "of these weights"
        )


def _expect_format(name: str | None, weights: Weights) -> None:
    found = "gguf" if weights.is_gguf else "safetensors"
    if name not in (None, "auto", found):
        raise CheckpointError(
            f"load.format is {name!r}, and {weights.path} has its weights as {found}"
        )


def dtype_of(opgraft_config: OpgraftConfig, config: Any) -> torch.dtype:
    """Return the dtype of weights and activations: that of the settings, else the checkpoint's."""
    name = opgraft_config.model.dtype
    if name not in (None, "auto"):
        # The settings allow only names of dtypes.
        return getattr(torch, str(name))  # type: ignore[no-any-return]
    found = getattr(config, "dtype", None)
    return found if isinstance(found, torch.dtype) else torch.float32


def _computed_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype of a checkpoint, or one of the same size that the platform names instead.

    Raises:
        ModelError: the platform names no dtype of that size.
    """
    platform = current_platform()
    # The platform knows its own devices only, and load.device may name another one.
    if device.type != torch.device(platform.device_type).type:
        return dtype
    capability = platform.capability(device.index or 0)
    if dtype in capability.dtypes:
        return dtype
    dtypes = ", ".join(map(_short, capability.dtypes))
    told = (
        f"the checkpoint has {_short(dtype)}, and {capability.name} of the platform "
        f"{platform.name} computes in {dtypes}: "
    )
    usable = [each for each in capability.dtypes if _short(each) in DTYPES]
    for other in usable:
        # Such as float16 for bfloat16 on a GPU that computes slowly in bfloat16.
        if other.itemsize == dtype.itemsize:
            told += f"model.dtype is {_short(other)} now; "
            told += f"model.dtype={_short(dtype)} keeps the other"
            logger.warning_once("%s", printable(told))
            return other
    # Another size would change the memory of the model, so the user has to choose it.
    example = f", for example model.dtype={_short(usable[0])}" if usable else ""
    raise ModelError(printable(f"{told}set model.dtype{example}"))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@contextmanager
def _default_dtype_and_device(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Make new tensors have the dtype and the device within the block."""
    former = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(former)
