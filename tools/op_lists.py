"""Write the lists of op families, in ``opgraft.ops`` and ``opgraft.functional``, from the folders of the families.

The ``__init__.py`` of a family imports all names from each module with classes of ops. ``functional.py`` of a family
exports forms, and so does a module that registers forms itself, unless ``functional.py`` imports these. A type checker
needs the lists as text.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "core"

STAR_IMPORT = re.compile(r"from (opgraft\.ops\.[\w.]+) import \*\n")


def main(package: Path = PACKAGE) -> None:
    texts = all_lists(package)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    print(f"{len(texts)} lists of families are current")


def all_lists(package: Path) -> dict[Path, str]:
    """Return the files with lists, and the text of each.

    Args:
        package: the folder of ``opgraft``.
    """
    listed = {
        package / "ops/__init__.py": modules_of_classes(package),
        package / "functional.py": modules_of_forms(package),
    }
    return {path: with_imports(path, modules) for path, modules in listed.items()}


def modules_of_classes(package: Path) -> Iterator[str]:
    """Yield the modules that families take their classes of ops from."""
    for path in (package / "ops").rglob("*/__init__.py"):
        yield from STAR_IMPORT.findall(path.read_text(encoding="utf-8"))


def modules_of_forms(package: Path) -> Iterator[str]:
    """Yield the modules that export functional forms."""
    for path in (package / "ops").rglob("*/functional.py"):
        yield module_name(package, path)
        exports = path.read_text(encoding="utf-8")
        for other in path.parent.glob("*.py"):
            name = module_name(package, other)
            registers = "@register_functional(" in other.read_text(encoding="utf-8")
            if other != path and registers and f"from {name} import" not in exports:
                yield name


def module_name(package: Path, path: Path) -> str:
    return ".".join(("opgraft", *path.relative_to(package).with_suffix("").parts))


def with_imports(path: Path, modules: Iterator[str]) -> str:
    """Return the text of a file with one star import for each module, in place of the former imports."""
    text = path.read_text(encoding="utf-8")
    lines = "".join(f"from {name} import *\n" for name in sorted(modules))
    return re.sub(f"({STAR_IMPORT.pattern})+", lines, text, count=1)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
