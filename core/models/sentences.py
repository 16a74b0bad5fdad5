"""The settings of an encoder of sentences, as sentence-transformers writes them beside the weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opgraft.errors import CheckpointError
from opgraft.models.files import parse_json, read_json
from opgraft.pooling import pooling_modes

_KINDS = ("Transformer", "Pooling", "Normalize")
_NO_LIMIT = 10**9  # transformers writes 10**30 where a tokenizer knows no limit


@dataclass(frozen=True)
class SentenceSettings:
    """The way from the states of a sentence's tokens to one vector.

    Attributes:
        pooling: names of ``opgraft.pooling.POOLINGS``.
        normalize: make vectors of unit length; so too where the checkpoint does not say.
        max_tokens: of a sentence, as far as the checkpoint says.
    """

    pooling: tuple[str, ...]
    normalize: bool
    max_tokens: int | None

    @classmethod
    def of(cls, folder: Path) -> SentenceSettings:
        """Read the settings of a checkpoint's folder.

        Raises:
            CheckpointError: they cannot be read, or ask for what is not known.
        """
        index = folder / "modules.json"
        rows = _read_list(index) if index.is_file() else []
        kinds = [str(row.get("type", "")).rpartition(".")[2] for row in rows]
        others = [kind for kind in kinds if kind not in _KINDS]
        if others:
            raise CheckpointError(
                f"{index} lists a module {others[0]!r:.80}, which cannot be applied: use sentence-transformers, or "
                "graft the model in a program of your own"
            )
        file = folder / _pooling_folder(index, rows, kinds) / "config.json"
        try:
            pooling = pooling_modes(read_json(file) if file.is_file() else {})
        except ValueError as error:
            raise CheckpointError(f"{file}: {error}") from error
        return cls(pooling, not rows or "Normalize" in kinds, _max_tokens(folder))


def _pooling_folder(index: Path, rows: list[dict[str, Any]], kinds: list[str]) -> str:
    found = [
        str(row.get("path", "")) for row, kind in zip(rows, kinds, strict=True) if kind == "Pooling"
    ]
    path = found[0] if found else "1_Pooling"
    if Path(path).is_absolute() or ".." in Path(path).parts:
        raise CheckpointError(
            f"{index} has the path {path!r:.80}, which leads out of the checkpoint"
        )
    return path


def _max_tokens(folder: Path) -> int | None:
    stated = (
        ("sentence_bert_config.json", "max_seq_length"),
        ("tokenizer_config.json", "model_max_length"),
    )
    values = [
        read_json(folder / name).get(key) for name, key in stated if (folder / name).is_file()
    ]
    return min(
        (value for value in values if type(value) is int and 0 < value < _NO_LIMIT), default=None
    )


def _read_list(file: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSON list."""
    rows = parse_json(file)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise CheckpointError(f"{file} holds no list of JSON objects")
    return rows
