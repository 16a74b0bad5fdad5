"""Places in the source, as messages and tables show them."""

from __future__ import annotations

import importlib

from conftest import Site
from opgraft.registry.op_classes import location_of

SOURCE = '''"""A text that shows code:
class Twice:
"""

def marked(cls):
    return cls


class Once:
    class Twice:
        pass

    class Hidden:
        pass


@marked
class Twice(Once):
    pass


@marked
class Hidden:
    pass


class WithMethods(Once):
    def run(self):
        pass


class Shown:
    """class Shown: is how it begins."""

    example = """
    class Shown:
    """

    def run(self):
        pass


Made = type("Made", (Once,), {"run": WithMethods.run})
"""
class Made:
"""
'''


def test_the_line_of_a_class(site: Site) -> None:
    """It is that of its statement, below decorators, whatever else of its name is in the file."""
    file = site.folder / "placed.py"
    file.write_text(SOURCE)
    placed = importlib.import_module("placed")
    lines = {
        placed.Once: 9,
        placed.Once.Twice: 10,
        placed.Once.Hidden: 13,
        placed.Twice: 18,
        placed.Hidden: 23,
        placed.WithMethods: 27,
        placed.Shown: 32,
    }
    for cls, line in lines.items():
        assert location_of(cls) == f"{file}:{line}"
    assert location_of(placed.Made) == "placed"
