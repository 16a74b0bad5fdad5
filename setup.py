"""The list of packages, and the parts of the metadata that depend on the address of the repository.

``DOCS_REPOSITORY_URL`` names the address, as it does for the documentation. The long description is the README, whose
links to files of the repository lead there. Without an address they become plain text: an index shows no files.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from setuptools import find_packages, setup

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

IMAGE = re.compile(r"<picture>.*?</picture>\s*", re.DOTALL)
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


def long_description(readme: str, repository: str) -> str:
    """Return the README with links that work anywhere, and without its charts, which are files of the repository."""

    def absolute(found: re.Match[str]) -> str:
        text, target = found.groups()
        if "://" in target:
            return found[0]
        if target.startswith("#"):  # an index makes other anchors of headings
            return text
        return f"[{text}]({repository}/blob/main/{target})" if repository else text

    return LINK.sub(absolute, IMAGE.sub("", readme))


def urls(repository: str) -> dict[str, str]:
    """Return the addresses of the project by their labels: none where no repository is named."""
    if not repository:
        return {}
    return {
        "Homepage": repository,
        "Documentation": f"{repository}/blob/main/docs/index.md",
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }


def packages() -> list[str]:
    """Return every package on disk by its name, which ``package-dir`` of pyproject.toml derives from its folder."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
    folders = project["tool"]["setuptools"]["package-dir"]
    inner = [f"{package}.{each}" for package in folders for each in find_packages(folders[package])]
    return [*folders, *inner]


REPOSITORY = os.environ.get("DOCS_REPOSITORY_URL", "").rstrip("/")

setup(
    packages=packages(),
    long_description=long_description(Path("README.md").read_text(encoding="utf-8"), REPOSITORY),
    long_description_content_type="text/markdown",
    project_urls=urls(REPOSITORY),
)
