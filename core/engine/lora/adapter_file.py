"""``AdapterFile``: an adapter as PEFT saves it, read and checked."""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any

from opgraft.config.checkpoints import find_checkpoint
from opgraft.engine.lora.patterns import LONGEST, NamePattern
from opgraft.errors import CheckpointError
from opgraft.models.files import ADAPTER, read_json
from opgraft.models.safetensors_file import open_safetensors, read_safetensors
from opgraft.ops.weights import LoadedTensor

WEIGHTS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"

_ROOT = "base_model.model."
_MATRICES: Mapping[str, str] = MappingProxyType(
    {
        ".lora_A.weight": "a",
        ".lora_B.weight": "b",
        ".lora_embedding_A": "a",
        ".lora_embedding_B": "b",
    }
)
_BASE_COPY = ".base_layer.weight"
"""The end of the name of a copy of the base model's embedding."""

_SETTINGS = frozenset({"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern"})
_SETTINGS |= {"alpha_pattern", "init_lora_weights"}
"""Keys of a config that are read."""

_IGNORED = frozenset({"task_type", "auto_mapping", "peft_version", "base_model_name_or_path"})
_IGNORED |= {"revision", "inference_mode", "target_modules", "exclude_modules", "lora_dropout"}
_IGNORED |= {"layers_to_transform", "layers_pattern", "megatron_config", "megatron_core"}
_IGNORED |= {"loftq_config", "eva_config", "qalora_group_size", "runtime_config"}
_IGNORED |= {"fan_in_fan_out"}
"""Keys of a config that change nothing here: the tensors say which modules have matrices."""

_MOST_MATCHES = 1_000_000
"""Patterns times modules. All are matched in some ten seconds."""

_NEUTRAL_INIT = (True, False, "gaussian", "eva", "orthogonal")
"""Values of ``init_lora_weights`` that leave the weights of the base model as they are."""


@dataclass(frozen=True)
class Matrices:
    """The two matrices of one module.

    Attributes:
        a: ``[rank, inputs]``.
        b: ``[outputs, rank]``.
        scale: multiplies the product.
        embeds: the module is an embedding.
    """

    a: LoadedTensor
    b: LoadedTensor
    scale: float
    embeds: bool

    @property
    def rank(self) -> int:
        """The rank of the product."""
        return int(self.a.shape[0])


@dataclass(frozen=True)
class AdapterFile:
    """An adapter.

    Attributes:
        path: the folder.
        modules: the matrices by the name of the module in the base model.
        base_copies: copies of the base model's weights by the name of the module.
        digest: of the content of the files. Equal adapters have equal digests.
    """

    path: Path
    modules: Mapping[str, Matrices]
    base_copies: Mapping[str, LoadedTensor]
    digest: str


def open_adapter(name: str, max_rank: int) -> AdapterFile:
    """Find, check and read an adapter.

    Args:
        name: a folder, or a name of the Hugging Face Hub in the local cache.
        max_rank: the largest rank that is taken.

    Raises:
        CheckpointError: there is none, a file is damaged, the rank is too large, or the adapter has
            parts that cannot be applied. The message lists all of these parts.
    """
    path = find_checkpoint(name)
    config_file = path / ADAPTER
    if not config_file.is_file():
        raise CheckpointError(f"{path} has no {ADAPTER}: give a folder that PEFT has saved")
    weights_file = path / WEIGHTS
    if not weights_file.is_file():
        is_pickled = (path / PICKLE).is_file()
        reason = f"{PICKLE} is a pickle, which may run any code" if is_pickled else "it is missing"
        raise CheckpointError(
            f"{path} has no {WEIGHTS} ({reason}): save the adapter with safe_serialization=True"
        )
    config = read_json(config_file)
    # Names and shapes first: another file of this name may be larger than the memory.
    _checked_parts(path, open_safetensors(weights_file), config, max_rank)
    tensors, content = read_safetensors(weights_file)
    modules, copies = _checked_parts(path, tensors, config, max_rank)
    # Of the read values: by now, other bytes may stand in the files.
    digest = sha256(json.dumps(config, sort_keys=True).encode() + sha256(content).digest())
    return AdapterFile(path, modules, copies, digest.hexdigest())


def _checked_parts(
    path: Path, tensors: Mapping[str, LoadedTensor], config: Mapping[str, Any], max_rank: int
) -> tuple[dict[str, Matrices], dict[str, LoadedTensor]]:
    """Return the matrices and the copies of base weights by module. No tensor is read.

    Raises:
        CheckpointError: the rank is too large, or some parts cannot be applied.
    """
    problems = list(_problems_of_config(config))
    modules, copies = _read_tensors(tensors, config, problems)
    if not modules and not problems:
        problems.append("it has no matrices")
    if problems:
        advice = "merge it into the base model with merge_and_unload() of peft, and serve that"
        raise CheckpointError.listing(f"the adapter {path} cannot be applied", problems, advice)
    rank = max(each.rank for each in modules.values())
    if rank > max_rank:
        raise CheckpointError(
            f"the adapter {path} has the rank {rank}, and lora.max_lora_rank is {max_rank}: raise "
            "it"
        )
    return modules, copies


def _problems_of_config(config: Mapping[str, Any]) -> Sequence[str]:
    """Return a line for each unknown setting that may change the result."""
    problems = []
    if config.get("peft_type") != "LORA":
        problems.append(f"peft_type is {config.get('peft_type')!r:.40}, not 'LORA'")
    if config.get("bias", "none") != "none":
        problems.append(f"bias is {config['bias']!r:.40}: it changes biases of the base model")
    initial = config.get("init_lora_weights", True)
    if initial not in _NEUTRAL_INIT:
        problems.append(
            f"init_lora_weights is {initial!r:.40}: it changes the weights of the base model"
        )
    for key, value in config.items():
        if key in _SETTINGS or key in _IGNORED or key == "bias":
            continue
        if value not in (None, False, {}, []):
            problems.append(f"{key} is {value!r:.80}")
    for key in ("r", "lora_alpha"):
        if not _is_positive(config.get(key)):
            problems.append(f"{key} is {config.get(key)!r:.40}, expected a finite number above 0")
    for key in ("rank_pattern", "alpha_pattern"):
        problems += _problems_of_pattern(key, config.get(key) or {})
    return problems


def _problems_of_pattern(name: str, pattern: Any) -> Sequence[str]:
    if not isinstance(pattern, Mapping):
        return [f"{name} is {pattern!r:.40}, expected a mapping"]
    problems = []
    for key, value in pattern.items():
        try:
            NamePattern(key)
        except ValueError as fault:
            problems.append(f"{name} has the pattern {key!r:.80}: {fault}")
        if not _is_positive(value):
            problems.append(f"{name} has {value!r:.40} for {key!r:.80}")
    return problems


def _is_positive(value: Any) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    # JSON of Python has NaN, infinity and integers that no float holds.
    return 0 < value <= sys.float_info.max


def _read_tensors(
    tensors: Mapping[str, LoadedTensor], config: Mapping[str, Any], problems: list[str]
) -> tuple[dict[str, Matrices], dict[str, LoadedTensor]]:
    """Return the matrices and the copies of base weights by module. Append to ``problems``."""
    copies = {}
    others = {}
    for name, tensor in tensors.items():
        inner = name.removeprefix(_ROOT)
        if inner.endswith(_BASE_COPY):
            copies[inner.removesuffix(_BASE_COPY)] = tensor
        else:
            others[name] = tensor
    pairs, embeddings = _pairs_by_module(others, problems)
    patterns = sum(len(config.get(key) or {}) for key in ("rank_pattern", "alpha_pattern"))
    if not problems and patterns * len(pairs) > _MOST_MATCHES:
        problems.append(f"it has {patterns} patterns for {len(pairs)} modules, which is too many")
    if problems:
        return {}, copies
    modules = {}
    for module, pair in pairs.items():
        fault = _fault_of(module, pair, config)
        if fault:
            problems.append(fault)
            continue
        rank = int(pair["a"].shape[0])
        scale = _scale(module, rank, config)
        modules[module] = Matrices(pair["a"], pair["b"], scale, module in embeddings)
    return modules, copies


def _pairs_by_module(
    tensors: Mapping[str, LoadedTensor], problems: list[str]
) -> tuple[dict[str, dict[str, LoadedTensor]], set[str]]:
    """Return the matrices A and B by module, and the embeddings. Append to ``problems``."""
    pairs: dict[str, dict[str, LoadedTensor]] = {}
    embeddings = set()
    for name, tensor in tensors.items():
        inner = name.removeprefix(_ROOT)
        suffix = next((each for each in _MATRICES if inner.endswith(each)), None)
        if suffix is None or inner == name:
            problems.append(f"the tensor {name!r:.120} belongs to no pair of matrices")
            continue
        module = inner.removesuffix(suffix)
        if len(module) > LONGEST:
            problems.append(f"the name {module!r:.120} has over {LONGEST} characters")
        pairs.setdefault(module, {})[_MATRICES[suffix]] = tensor
        if "embedding" in suffix:
            embeddings.add(module)
    return pairs, embeddings


def _fault_of(module: str, pair: Mapping[str, LoadedTensor], config: Mapping[str, Any]) -> str:
    """Return the fault of the matrices of a module; empty if they fit each other."""
    lacking = {"a", "b"} - pair.keys()
    if lacking:
        return f"{module!r:.120} lacks the matrix {lacking.pop().upper()}"
    a = tuple(pair["a"].shape)
    b = tuple(pair["b"].shape)
    rank = _of_pattern(module, config.get("rank_pattern"), config["r"])
    if len(a) != 2 or len(b) != 2 or a[0] != rank or b[1] != rank:
        return f"the matrices of {module!r:.120} are {a} and {b}, and the config's rank is {rank}"
    return ""


def _scale(module: str, rank: int, config: Mapping[str, Any]) -> float:
    alpha = _of_pattern(module, config.get("alpha_pattern"), config["lora_alpha"])
    # Rank-stabilised LoRA: Kalajdzievski, arXiv:2312.03732.
    return float(alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _of_pattern(module: str, pattern: Mapping[str, Any] | None, default: Any) -> Any:
    """Return the value of the first key that matches the end of a name, as PEFT does."""
    for key, value in (pattern or {}).items():
        if _pattern(key).matches(module):
            return value
    return default


@functools.lru_cache(maxsize=2048)
def _pattern(text: str) -> NamePattern:
    return NamePattern(text)
