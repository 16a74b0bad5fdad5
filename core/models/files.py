"""The files of a checkpoint, checked before a tensor is read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from opgraft.base.files import read_regular
from opgraft.base.log import logger
from opgraft.base.text import printable
from opgraft.config.checkpoints import find_checkpoint
from opgraft.errors import CheckpointError
from opgraft.models.gguf_file import open_gguf
from opgraft.models.gguf_names import renamed
from opgraft.models.lazy import LazyTensor
from opgraft.models.safetensors_file import open_safetensors

_LARGEST_JSON = 1 << 26
"""Bytes of a JSON file at most. Indices of shards are the largest of these files."""

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MODULES = "modules.json"
SENTENCE_CONFIG = "config_sentence_transformers.json"
ADAPTER = "adapter_config.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True)
class Weights:
    """The tensors of a checkpoint. No tensor is read yet.

    Attributes:
        path: the folder, or the GGUF file.
        tensors: the tensors by their names in transformers.
        metadata: the metadata of a GGUF file; empty for safetensors.
        stored: the tensors of a GGUF file by their names in the file; empty for safetensors.
        outer: the given folder, if the model is in a folder within.
    """

    path: Path
    tensors: Mapping[str, LazyTensor]
    metadata: Mapping[str, Any] = field(default_factory=dict, repr=False)
    stored: Mapping[str, LazyTensor] = field(default_factory=dict, repr=False)
    outer: Path | None = None

    @property
    def is_gguf(self) -> bool:
        return bool(self.metadata)


_PIECE = 1 << 20
"""Bytes of a file that are read at a time."""

_OPENED: ContextVar[dict[str, Weights] | None] = ContextVar("opgraft_opened", default=None)
"""Within ``opened_once``: the checkpoints that were opened, by the names that were given."""

_CONFIG_ONLY: ContextVar[bool] = ContextVar("opgraft_config_only", default=False)
"""Within ``opened_once(config_only=True)``: a folder with a ``config.json`` may lack weights."""


@contextmanager
def opened_once(*, config_only: bool = False) -> Iterator[None]:
    """Make ``open_weights`` open each checkpoint once within the block.

    An inner block shares the opened checkpoints with the outer block. The outer block holds them
    until its end, and no file is checked again.

    Args:
        config_only: a folder with a ``config.json`` may lack weights. Such a block shares nothing
            with an outer block that needs weights.
    """
    shares = _OPENED.get() is not None and _CONFIG_ONLY.get() == config_only
    if shares:
        yield
        return
    former_opened = _OPENED.set({})
    former_only = _CONFIG_ONLY.set(config_only)
    try:
        yield
    finally:
        _OPENED.reset(former_opened)
        _CONFIG_ONLY.reset(former_only)


def open_weights(name: str | Path) -> Weights:
    """Find and check the files of a checkpoint. No tensor is read.

    Within ``opened_once``, a checkpoint that was opened before is returned.

    Raises:
        CheckpointError: there are no files, or files are damaged, missing or pickles. A path leads
            out of the folder. Two files have a tensor of one name. The message lists all faults.
        InputError: the library for the format is not installed.
    """
    opened = _OPENED.get()
    if opened is None:
        return _open_checkpoint(name)
    key = str(name)
    if key not in opened:
        opened[key] = _open_checkpoint(name)
    return opened[key]


def _open_checkpoint(name: str | Path) -> Weights:
    given = find_checkpoint(name)
    path = _model_folder(given)
    outer = None if path == given else given
    try:
        listed = weight_files(path)
    except CheckpointError:
        # A plan of splits needs no weights.
        if _CONFIG_ONLY.get() and (path / "config.json").is_file():
            return Weights(path, {}, outer=outer)
        raise
    if listed[0].suffix == ".gguf":
        return _gguf_weights(listed)
    tensors = _merged(listed, open_safetensors, _index_of(path))
    return Weights(path, tensors, outer=outer)


def _model_folder(path: Path) -> Path:
    """Return the folder of the model: the given folder, or a folder within.

    Older versions of sentence-transformers have an inner folder, such as ``0_Transformer``, and
    name the folder in ``modules.json``.
    """
    if not (path / MODULES).is_file():
        return path
    inner = ""
    for row in sentence_modules(path):
        if row["type"] == "Transformer":
            inner = row["path"]
            break
    if not (path / inner).is_dir():
        raise CheckpointError(
            f"{path / MODULES} says that the model is in {inner!r:.80}, which is missing: download "
            "it again"
        )
    return path / inner if inner else path


def sentence_modules(folder: Path) -> list[dict[str, str]]:
    """Return the modules that sentence-transformers lists for a folder, if there is a list.

    Returns:
        The ``type`` and the ``path`` of each module. The type of a module of sentence-transformers
        is the bare name of its class. The type of another module is the full name.

    Raises:
        CheckpointError: the list is damaged, or a path leads out of the folder.
    """
    file = folder / MODULES
    rows = parse_json(file) if file.is_file() else []
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise CheckpointError(f"{file} holds no list of JSON objects")
    return [_sentence_module(file, row) for row in rows]


def _sentence_module(file: Path, row: Mapping[str, Any]) -> dict[str, str]:
    path = str(row.get("path", ""))
    # A checkpoint comes from others, and must not make this process read other files.
    if Path(path).is_absolute() or ".." in Path(path).parts:
        raise CheckpointError(
            f"{file} has the path {path!r:.80}, which leads out of the checkpoint"
        )
    kind = str(row.get("type", ""))
    if kind.startswith("sentence_transformers."):
        kind = kind.rpartition(".")[2]
    return {"type": kind, "path": path}


def _gguf_weights(listed: list[Path]) -> Weights:
    opened = {file: open_gguf(file) for file in listed}
    # Only the first part of a split file has the metadata of the model.
    metadata = opened[listed[0]].metadata
    stored = _merged(listed, lambda file: dict(opened[file].tensors), None)
    return Weights(listed[0], renamed(metadata, stored, listed[0]), metadata, stored)


def weight_files(path: Path) -> list[Path]:
    """Return the files with the weights of a folder, or all parts of a file.

    Raises:
        CheckpointError: there are no files, or files are missing. All files are pickles. An
            adapter is beside the files.
    """
    if path.is_file():
        return _files_of(path)
    if (path / ADAPTER).is_file():
        raise CheckpointError(
            f"{path} holds an adapter ({ADAPTER}), and opgraft applies none: answers would differ. "
            "Merge it into the model (merge_and_unload() of peft) and save that, or take it away."
        )
    index = _index_of(path)
    if index is not None:
        return _shards(index)
    whole = path / WHOLE
    if whole.is_file():
        _tell_of_stale(path)
        return [whole]
    # Files of other names, such as those that tools for quantization write.
    found = sorted(path.glob("*.safetensors")) or _gguf_files(path)
    if found:
        return found
    pickles = sorted(file.name for file in path.iterdir() if file.suffix in PICKLES)
    if pickles:
        raise CheckpointError(
            f"{path} has its weights only as a pickle ({', '.join(pickles)}), which is refused: "
            "loading a pickle can run any code. Convert it with "
            "save_pretrained(safe_serialization=True)."
        )
    has = "a config.json but" if (path / "config.json").is_file() else "no config.json and"
    raise CheckpointError(
        f"{path} has {has} no *.safetensors and no *.gguf file: the weights are missing. "
        "Give the folder that save_pretrained wrote, or a .gguf file"
    )


def state_of_checkpoint(name: str) -> tuple[tuple[str, int, int, int], ...]:
    """Return paths, sizes and times of the files of a checkpoint, which change with its files."""
    states = []
    for file in _read_files(name):
        now = file.stat()
        # The time of change cannot be set back, as the time of writing can.
        states.append((str(file), now.st_size, now.st_mtime_ns, now.st_ctime_ns))
    return tuple(states)


def digest_of_checkpoint(name: str) -> str:
    """Return the SHA-256 of a checkpoint: of its weights, and of its files of settings."""
    digest = sha256()
    for file in _read_files(name):
        # Without name and size, bytes could move from one file to the next unnoticed.
        header = f"{file.name}\0{file.stat().st_size}\0"
        digest.update(header.encode())
        with file.open("rb") as opened:
            while piece := opened.read(_PIECE):
                digest.update(piece)
    return digest.hexdigest()


def _read_files(name: str) -> list[Path]:
    path = _model_folder(find_checkpoint(name))
    folder = path if path.is_dir() else path.parent
    return [*sorted(folder.glob("*.json")), *weight_files(path)]


def _files_of(file: Path) -> list[Path]:
    if file.name.endswith(".index.json"):
        return _shards(file)
    if file.suffix == ".gguf":
        return _splits(file)
    if file.suffix == ".safetensors":
        return [file]
    reason = "is of no kind that is read"
    if file.suffix in PICKLES:
        reason = "is a pickle: loading it can run any code"
    raise CheckpointError(
        f"{file} {reason}. Give a .safetensors, .gguf or {INDEX} file, or a folder with them."
    )


def _gguf_files(folder: Path) -> list[Path]:
    found = sorted(folder.glob("*.gguf"))
    # Folders often have one model in several quantizations, and only the user knows the right one.
    if len(found) > 1 and set(found) != set(_splits(found[0])):
        names = ", ".join(file.name for file in found[:5])
        raise CheckpointError(
            f"{folder} has {len(found)} GGUF files ({names}): give the one that is meant"
        )
    return found and _splits(found[0])


def _splits(file: Path) -> list[Path]:
    """Return all parts of a split GGUF file; the file itself if it is not split."""
    found = _SPLIT.fullmatch(file.name)
    if not found:
        return [file]
    start, _, total = found.groups()
    count = int(total)
    present = {one.name for one in file.parent.glob("*.gguf")}
    names = [f"{start}-{number:05}-of-{total}.gguf" for number in range(1, count + 1)]
    missing = [f"{name} is missing" for name in names if name not in present]
    if missing or not names:
        raise CheckpointError.listing(f"{file} is a part of {count}", missing, "download it again")
    return [file.parent / name for name in names]


def _shards(index: Path) -> list[Path]:
    """Return the files of an index, each in the folder of the index."""
    names = sorted(set(_weight_map(index).values()))
    if not names:
        raise CheckpointError(f"{index} names no file: download it again")
    for name in names:
        # A colon names a stream of a file on Windows.
        if name in ("", ".", "..") or set(name) & set("/\\:\0"):
            raise CheckpointError(
                f"{index} names the file {name!r:.200}, which is refused: shards lie beside their "
                "index, and a path may lead out of the checkpoint"
            )
        if not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{index} names the file {name!r:.200}, which is no .safetensors file: it is "
                "refused"
            )
    missing = [
        f"{name} is listed in {index.name} and missing"
        for name in names
        if not (index.parent / name).is_file()
    ]
    if missing:
        raise CheckpointError.listing(str(index.parent), missing, "download it again")
    return [index.parent / name for name in names]


def _weight_map(index: Path) -> dict[str, str]:
    """Return tensor → file of an index."""
    weight_map: Any = read_json(index).get("weight_map")
    is_map = isinstance(weight_map, dict) and all(
        isinstance(name, str) for name in weight_map.values()
    )
    if not is_map:
        raise CheckpointError(
            f"{index} has no weight_map from tensor names to file names: download it again"
        )
    file_of_tensor: dict[str, str] = weight_map
    return file_of_tensor


def _index_of(path: Path) -> Path | None:
    """Return the index of a checkpoint's shards; ``None`` without an index.

    An index beside ``model.safetensors`` counts only if the index names that file. Another index
    is left over from an earlier save: ``save_pretrained`` removes the shards of such a save, but
    not the index.
    """
    index = path if path.is_file() else path / INDEX
    if not (index.name.endswith(".index.json") and index.is_file()):
        return None
    if path.is_file() or not (path / WHOLE).is_file():
        return index
    try:
        named = set(_weight_map(index).values())
    # A damaged index beside a whole file is left over as well.
    except CheckpointError:
        return None
    return index if WHOLE in named else None


def _tell_of_stale(folder: Path) -> None:
    """Warn of an unread index, if there is one."""
    if not (folder / INDEX).is_file():
        return
    logger.warning(
        "%s is read, and %s beside it is not: an earlier save has left the index, as it does not "
        "name this file. If its shards are meant, remove %s; else remove the index",
        printable(str(folder / WHOLE)),
        INDEX,
        WHOLE,
    )


def _merged(
    listed: list[Path], open_file: Callable[[Path], Mapping[str, LazyTensor]], index: Path | None
) -> dict[str, LazyTensor]:
    """Open files and return all tensors.

    Args:
        listed: the files.
        open_file: returns the tensors of a file.
        index: the index of the files, if there is one.

    Raises:
        CheckpointError: a file is damaged, two files have a tensor of one name, or a tensor is not
            in the file of the index.
    """
    tensors: dict[str, LazyTensor] = {}
    homes: dict[str, str] = {}
    problems: list[str] = []
    for file in listed:
        # One error lists all damaged files, so that a user downloads them at once.
        try:
            found = open_file(file)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        for name in found:
            if name in homes:
                problems.append(f"tensor {name!r:.200} is in {homes[name]} and {file.name}")
        tensors |= found
        homes |= dict.fromkeys(found, file.name)
    if index and not problems:
        problems += _misdirected(_weight_map(index), homes)
    if not problems:
        return tensors
    if len(listed) == 1:
        raise CheckpointError(problems[0])
    raise CheckpointError.listing(f"{listed[0].parent} is damaged", problems, "download it again")


def _misdirected(weight_map: Mapping[str, str], homes: Mapping[str, str]) -> Iterator[str]:
    """Yield a message for each tensor that is not in the file of the index."""
    for name, file in weight_map.items():
        if homes.get(name) != file:
            where = f"in {homes[name]}" if name in homes else "in none of the files"
            yield f"the index has tensor {name!r:.200} in {file}, and it is {where}"


def parse_json(file: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        CheckpointError: the file cannot be read as JSON.
    """
    try:
        return json.loads(read_regular(file, _LARGEST_JSON).decode())
    # RecursionError is raised for lists in a thousand lists.
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON: {error}") from error


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        CheckpointError: the file cannot be read, or holds no object.
    """
    data = parse_json(file)
    if not isinstance(data, dict):
        raise CheckpointError(f"{file} holds a {type(data).__name__}, expected a JSON object")
    return data
