"""Measure how easily Python code is read: ``python tools/legibility.py [--worst N] [PATH ...]``.

Without a path: core, platforms and plugins, a row for each folder and the total. One folder gives
a row for each of its files. ``--worst 20`` lists the densest functions and the hardest sentences
too. ``--record`` writes the figures of every folder into ``tests/packaging/legibility.json``.
``tests/packaging/test_house_style.py`` lets no folder fall behind the record or, once a goal is
reached, behind that goal.

The measure was calibrated on pluggy, anyio, structlog, httpx, equinox, click, jinja2 and packaging.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[1]
FOLDERS = ("core", "platforms", "plugins")
EXAMPLES = "reference_plugins"
"""The folder of plugins that authors copy from. Its figures are recorded, but no part of the total."""

RECORD = REPOSITORY / "tests/packaging/legibility.json"

RELATIVE = re.compile(r"\b(which|that|what|whose|who|whom)\b", re.I)
PRONOUN = re.compile(r"\b(it|its|they|their|them)\b", re.I)
RIDDLE = re.compile(
    r"\b(of|by|in|with|for|from|to|on|under|at|behind|beside) (which|whom|what)\b", re.I
)
OPENING = re.compile(r"(\w+ )?(what|whether|which|why|how)\b", re.I)
CODE = re.compile(r"`+[^`]*`+")
WORD = re.compile(r"[A-Za-z][A-Za-z'\-]*")
DIRECTIVE = re.compile(r"type:|noqa|!/")
"""Comments for tools, which explain nothing to a reader."""

SENTENCE_END = re.compile(r"(?<=[.!?:;])\s+")

WIDEST = 100
"""Columns of the longest line."""


class Goal(NamedTuple):
    """One figure, with the range that the project wants."""

    title: str
    least: float
    most: float
    digits: int


UNBOUNDED = float("inf")
GOALS = {
    "nodes_of_largest_percent": Goal("nodes/fn", 0, 250, 0),
    "nodes_of_largest": Goal("max", 0, 400, 0),
    "nodes_per_line": Goal("nodes/line", 0, 8, 1),
    "nodes_per_statement": Goal("nodes/stmt", 0, 11.5, 1),
    "wide_lines": Goal(">100", 0, 0, 2),
    "comments": Goal("comments", 3, UNBOUNDED, 1),
    "docstring_words": Goal("docs", 80, 140, 0),
    "relative": Goal("relative", 0, 1.8, 2),
    "pronouns": Goal("pronoun", 0, 16, 1),
    "riddles": Goal("riddle", 0, 1, 1),
    "openings": Goal("opening", 0, 2, 1),
}
"""Per figure its goal, in the order of the columns:

- syntax nodes of a function's body, 99th percentile and largest;
- syntax nodes per line and per statement of a function's body, means;
- lines longer than 100 columns, per cent;
- comments per 100 lines;
- words of docstrings per 100 lines;
- which, that, what, whose, who, whom per 100 words of docstrings;
- it, its, they, their, them per 1,000 words of docstrings and comments;
- "of which", "by what" and their like per 1,000 words of docstrings and comments;
- docstrings that open "Tell whether", "Return what", "Say why" and their like, per cent.
"""


class Text(NamedTuple):
    """A docstring or comment, and where it stands."""

    words: str
    place: str


class Function(NamedTuple):
    """The size of a function's body, and where the function stands."""

    nodes: int
    lines: int
    statements: int
    place: str


@dataclass
class Reading:
    """Everything that was counted in some files."""

    lines: int = 0
    wide_lines: int = 0
    functions: list[Function] = field(default_factory=list)
    docstrings: list[Text] = field(default_factory=list)
    attribute_docstrings: list[Text] = field(default_factory=list)
    comments: list[Text] = field(default_factory=list)

    def add(self, path: Path) -> None:
        """Count one file.

        Raises:
            SyntaxError: the file is not Python.
        """
        source = path.read_text(encoding="utf-8")
        rows = source.splitlines()
        self.lines += len(rows)
        self.wide_lines += sum(len(row) > WIDEST for row in rows)
        self.comments += _comments(source, path)
        described = set()
        for node in ast.walk(ast.parse(source, str(path))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self.functions += _function(node, path)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
                text = ast.get_docstring(node)
                if text is None:
                    continue
                described.add(id(node.body[0]))
                self.docstrings.append(Text(text, f"{path}:{getattr(node, 'lineno', 1)}"))
            elif _is_text(node) and id(node) not in described:
                self.attribute_docstrings.append(_text_below_attribute(node, path))

    def figures(self) -> dict[str, float]:
        """Return the figures by the names of :data:`GOALS`."""
        documentation = " ".join(each.words for each in self.docstrings)
        written = (*self.docstrings, *self.attribute_docstrings, *self.comments)
        prose = " ".join(each.words for each in written)
        nodes = sorted(function.nodes for function in self.functions) or [0]
        total_nodes = sum(nodes)
        opened = sum(bool(OPENING.match(each.words)) for each in self.docstrings)
        return {
            "nodes_of_largest_percent": nodes[min(len(nodes) - 1, int(0.99 * len(nodes)))],
            "nodes_of_largest": nodes[-1],
            "nodes_per_line": _share(total_nodes, sum(each.lines for each in self.functions)),
            "nodes_per_statement": _share(
                total_nodes, sum(each.statements for each in self.functions)
            ),
            "wide_lines": _share(self.wide_lines, self.lines, 100),
            "comments": _share(len(self.comments), self.lines, 100),
            "docstring_words": _share(count_words(documentation), self.lines, 100),
            "relative": _share(_hits(RELATIVE, documentation), count_words(documentation), 100),
            "pronouns": _share(_hits(PRONOUN, prose), count_words(prose), 1000),
            "riddles": _share(_hits(RIDDLE, prose), count_words(prose), 1000),
            "openings": _share(opened, len(self.docstrings), 100),
        }


def read(paths: Iterable[Path]) -> Reading:
    """Count files together."""
    reading = Reading()
    for path in paths:
        reading.add(path)
    return reading


def files_below(path: Path) -> list[Path]:
    """Return the Python files of a folder, or the file itself."""
    if path.is_file():
        return [path]
    left_by_tools = {"__pycache__", "build"}
    return sorted(found for found in path.rglob("*.py") if not left_by_tools & {*found.parts})


def folders_of(path: Path) -> dict[str, list[Path]]:
    """Return the files of each direct subfolder, and of the folder itself under ``path/*.py``."""
    groups: dict[str, list[Path]] = {}
    for file in files_below(path):
        inner = file.relative_to(path).parts if path.is_dir() else ()
        name = f"{path}/{inner[0]}" if len(inner) > 1 else f"{path}/*.py"
        groups.setdefault(name, []).append(file)
    return groups


def figures_by_folder() -> dict[str, dict[str, float]]:
    """Return the figures of every folder of the package, and of every reference plugin.

    The figures are rounded as they are printed.
    """
    return {
        name.removeprefix(f"{REPOSITORY}/"): {
            key: round(value, GOALS[key].digits) for key, value in read(files).figures().items()
        }
        for folder in (*FOLDERS, EXAMPLES)
        for name, files in folders_of(REPOSITORY / folder).items()
    }


def count_words(text: str) -> int:
    """Count words, where quoted code is one word."""
    return len(WORD.findall(CODE.sub(" X ", text)))


def _hits(pattern: re.Pattern[str], text: str) -> int:
    return len(pattern.findall(text))


def _share(part: float, whole: float, scale: float = 1) -> float:
    return scale * part / max(1, whole)


def _comments(source: str, path: Path) -> Iterator[Text]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not DIRECTIVE.search(token.string):
            yield Text(token.string.lstrip("# "), f"{path}:{token.start[0]}")


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef, path: Path) -> Iterator[Function]:
    """Yield the size of a function, unless a docstring is all that its body has."""
    body = node.body[1:] if _is_text(node.body[0]) else node.body
    if not body:
        return
    inside = [found for statement in body for found in ast.walk(statement)]
    last = body[-1]
    yield Function(
        nodes=len(inside),
        lines=(last.end_lineno or last.lineno) - body[0].lineno + 1,
        statements=sum(isinstance(found, ast.stmt) for found in inside),
        place=f"{path}:{node.lineno} {node.name}",
    )


def _is_text(node: ast.AST) -> bool:
    """Return True for a string that stands alone: a docstring, or the text below an attribute."""
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
        return False
    return isinstance(node.value.value, str)


def _text_below_attribute(node: ast.AST, path: Path) -> Text:
    value = node.value.value  # type: ignore[attr-defined]  # _is_text has looked
    return Text(value, f"{path}:{node.lineno}")  # type: ignore[attr-defined]


def _row(name: str, reading: Reading) -> str:
    figures = reading.figures()
    cells = (f"{figures[key]:11.{goal.digits}f}" for key, goal in GOALS.items())
    return f"{name:28}{reading.lines:8}{''.join(cells)}"


def _print_worst(reading: Reading, count: int) -> None:
    print("\nDensest functions (nodes, nodes per line):")
    for function in sorted(reading.functions, reverse=True)[:count]:
        print(f"  {function.nodes:5} {function.nodes / function.lines:5.1f}  {function.place}")
    print("\nSentences with most relative words and pronouns:")
    for hits, _, sentence in sorted(_hard_sentences(reading), reverse=True)[:count]:
        print(f"  {hits} {sentence.place}  {sentence.words[:200]}")


def _hard_sentences(reading: Reading) -> set[tuple[int, float, Text]]:
    """Return sentences with three or more such words: the number, the share, and the sentence."""
    hard = set()
    for text in (*reading.docstrings, *reading.attribute_docstrings, *reading.comments):
        for sentence in SENTENCE_END.split(" ".join(text.words.split())):
            hits = _hits(RELATIVE, sentence) + _hits(PRONOUN, sentence)
            if hits >= 3:
                share = hits / max(1, count_words(sentence))
                hard.add((hits, share, Text(sentence, text.place)))
    return hard


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", type=Path, default=[Path(name) for name in FOLDERS])
    parser.add_argument("--worst", type=int, metavar="N", default=0, help="list N of the worst")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    arguments = parser.parse_args()
    if arguments.record:
        RECORD.write_text(json.dumps(figures_by_folder(), indent=1) + "\n", encoding="utf-8")
        return
    columns = "".join(f"{goal.title:>11}" for goal in GOALS.values())
    print(f"{'':28}{'lines':>8}{columns}")
    alone = len(arguments.paths) == 1 and str(arguments.paths[0]) not in FOLDERS
    for path in arguments.paths:
        by_file = {str(file): [file] for file in files_below(path)}
        for name, files in (by_file if alone else folders_of(path)).items():
            print(_row(name, read(files)))
    total = read(file for path in arguments.paths for file in files_below(path))
    print(_row("total", total))
    if arguments.worst:
        _print_worst(total, arguments.worst)


if __name__ == "__main__":
    main()
