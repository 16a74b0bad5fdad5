"""Opening a Hugging Face checkpoint folder: checked file by file first, so that a broken one gets a clear error."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from opgraft.errors import InputError
from opgraft.models.config import LOCAL_ONLY, check_config
from opgraft.models.extras import import_extra
from opgraft.models.files import BUNDLED, find_checkpoint, open_weights, read_json
from opgraft.models.sentences import SentenceSettings
from opgraft.text import described
from torch import nn

_CAUSAL = ("ForCausalLM", "LMHeadModel")


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
            CheckpointError: the settings cannot be read, or ask for what is not known.
        """
        return SentenceSettings.of(self.folder).pooling

    def load(self, dtype: torch.dtype) -> tuple[nn.Module, Any]:
        """Load the model in evaluation mode and its tokenizer, from the local files only and running no code in them.

        Raises:
            InputError: transformers is not installed, does not know the architecture, or rejects the files; these
                lack tensors of the model, or have more; it needs code from the folder, or is an encoder with a decoder.
        """
        transformers = import_extra("transformers")
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
        options = dict(LOCAL_ONLY)
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
        return [file.name for file in files if file.is_file() and "auto_map" in read_json(file)]


def open_checkpoint(name: str) -> Checkpoint:
    """Check the folder ``name``, or the bundled encoder.

    Raises:
        InputError: no name or no such folder, or one for prompts only; no or broken ``config.json``, or one that names
            code of a hub; weights missing, cut short, elsewhere, or only as a pickle; no ``tokenizer.json``.
    """
    folder = find_checkpoint(name) if name in ("", *BUNDLED) else Path(name)
    if folder.is_file() or _has_only_gguf(folder):
        raise InputError(
            f'{name!r} answers a prompt, and none is given: opgraft run MODEL "…". Without one, MODEL is a folder with '
            "safetensors weights, or 'minilm'"
        )
    if not folder.is_dir():
        raise InputError(f"{name!r} is no folder: give a Hugging Face checkpoint folder, or 'minilm'")
    config = check_config(folder / "config.json")
    open_weights(folder)  # which checks the files
    if not (folder / "tokenizer.json").is_file():
        raise InputError(f"{folder} has no tokenizer.json: save the tokenizer beside the weights (save_pretrained)")
    return Checkpoint(folder, config)


def _has_only_gguf(folder: Path) -> bool:
    return any(folder.glob("*.gguf")) and not any(folder.glob("*.safetensors"))


def _counted(names: list[str], fault: str) -> str:
    shown = f"{', '.join(names[:3])}{', …' if len(names) > 3 else ''}"
    return f"{len(names)} tensor{'' if len(names) == 1 else 's'} {fault} ({shown})"
