"""Models by their names on the Hugging Face Hub, found in the local cache of its tools."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from opgraft.config import LoadConfig, ModelConfig, OpgraftConfig
from opgraft.config.environment import hub_cache
from opgraft.errors import CheckpointError
from opgraft.models import find_checkpoint, load_model, open_weights

COMMIT, OLDER = "0123456789abcdef" * 2 + "01234567", "f" * 40
NAME = "acme/Small.Model-1"


def cached(cache: Path, checkpoint: Path, *, main: str | None = COMMIT) -> Path:
    """Lay a checkpoint out as the Hub's tools do: contents as blobs, and a folder of links for the commit."""
    folder = cache / "models--acme--Small.Model-1"
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (folder / "blobs").mkdir()
    for file in checkpoint.iterdir():
        blob = folder / "blobs" / f"blob-of-{file.name}"
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(Path("../..") / "blobs" / blob.name)
    if main is not None:
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(main)
    return snapshot


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


@pytest.mark.parametrize("main", [COMMIT, None, OLDER, "\ufffe", "../../elsewhere"])
def test_a_model_of_the_cache_is_loaded(cache: Path, sharded: Path, main: str | None) -> None:
    """The folder is that of the branch main, or the only one if the cache names none that is there."""
    snapshot = cached(cache, sharded, main=main)
    assert find_checkpoint(NAME) == snapshot
    assert open_weights(NAME).tensors.keys() == open_weights(sharded).tensors.keys()
    config = OpgraftConfig(model=ModelConfig(name=NAME), load=LoadConfig(progress=False))
    assert load_model(config) is not None


def test_of_two_revisions_main_is_taken(cache: Path, sharded: Path) -> None:
    """Without a branch main nobody says which of them is meant."""
    snapshot = cached(cache, sharded)
    (snapshot.parent / OLDER).mkdir()
    assert find_checkpoint(NAME) == snapshot
    (snapshot.parents[1] / "refs" / "main").unlink()
    with pytest.raises(CheckpointError, match=rf"has 2 revisions in the cache.*{OLDER}"):
        find_checkpoint(NAME)


def test_another_revision_than_main_is_told(
    cache: Path, sharded: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The only revision there is used, and a line says which."""
    snapshot = cached(cache, sharded, main=None)
    other = "e" * 40
    snapshot.rename(snapshot.with_name(other))
    find_checkpoint(NAME)
    find_checkpoint(NAME)
    (line,) = caplog.messages
    assert line == f"{NAME}: the revision {other} is used, as no other is in the cache"


def test_a_model_without_an_organisation(cache: Path, sharded: Path) -> None:
    """Old models of the Hub have a name without a slash: it counts if the cache has it."""
    snapshot = cached(cache, sharded)
    snapshot.parents[1].rename(cache / "models--gpt2")
    assert find_checkpoint("gpt2") == cache / "models--gpt2" / "snapshots" / COMMIT
    with pytest.raises(CheckpointError, match="the name of a model in the cache"):
        find_checkpoint("bert-base-uncased")


@pytest.mark.parametrize(
    ("spelled", "more"),
    [
        ("https://example.org/acme/small", ""),
        ("https://example.org/acme/small/blob/main/x.gguf", ""),
        ("hf://acme/small", ""),
        ("acme/small/", ""),
        ("acme/small@v1.0", ", and a revision or a file of it is given by its path below "),
        ("acme/small:Q4_K_M", ", and a revision or a file of it is given by its path below "),
    ],
)
def test_other_spellings_of_a_name(cache: Path, spelled: str, more: str) -> None:
    """The message has the name, and the way to give a revision."""
    with pytest.raises(CheckpointError, match=rf"of the Hub, its name is 'acme/small'{more}"):
        find_checkpoint(spelled)


def test_a_folder_of_that_name_comes_first(cache: Path, sharded: Path) -> None:
    """A path that exists is taken before the cache."""
    cached(cache, sharded)
    Path(NAME).mkdir(parents=True)
    assert find_checkpoint(NAME) == Path(NAME)


def test_a_model_that_is_not_there(cache: Path) -> None:
    """The message names the cache and the command that downloads the model."""
    said = f"not in the cache {cache}. opgraft downloads nothing: 'hf download {NAME}' does"
    with pytest.raises(CheckpointError, match=re.escape(said)):
        open_weights(NAME)


@pytest.mark.parametrize("name", ["a/b/c", "../acme", "/acme/small", "acme/", "acme/.."])
def test_paths_are_no_names(cache: Path, name: str) -> None:
    """What cannot be a name of the Hub is a path that does not exist."""
    with pytest.raises(CheckpointError, match="give a checkpoint folder"):
        find_checkpoint(name)


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HUGGINGFACE_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HF_HOME": "/b", "XDG_CACHE_HOME": "/c"}, "/b/hub"),
        ({"HF_HUB_CACHE": "", "XDG_CACHE_HOME": "/c"}, "/c/huggingface/hub"),
        ({}, "~/.cache/huggingface/hub"),
    ],
)
def test_the_folder_of_the_cache(variables: dict[str, str], folder: str) -> None:
    """The variables are those that the Hub's own library reads."""
    assert hub_cache(variables) == Path(folder).expanduser()
