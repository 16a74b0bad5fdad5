"""A small writer of SVG: boxes, arrows, bars and text, in the colours of a light and of a dark page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape

WIDTH = 560
"""Width of every figure, in pixels. Text of 14 can be read on a phone that shows 60 %."""

THEMES: Mapping[str, Mapping[str, str]] = {
    "light": {
        "ink": "#1f2328",
        "muted": "#59636e",
        "line": "#8c959f",
        "panel": "#f6f8fa",
        "other": "#8c959f",
        "ours": "#5aa9a0",
        "best": "#0f766e",
    },
    "dark": {
        "ink": "#e6edf3",
        "muted": "#9da7b1",
        "line": "#768390",
        "panel": "#262c36",
        "other": "#768390",
        "ours": "#2a8f86",
        "best": "#4fd1c5",
    },
}
"""Theme to colour by role. Figures have no background, because pages differ."""

SIZES: Mapping[str, tuple[float, float]] = {
    "": (14, 0.62),
    "title": (16, 0.66),
    "strong": (14, 0.66),
    "best-text": (14, 0.66),
    "muted": (13, 0.62),
    "code": (13, 0.61),
}
"""Style to the size of its text, and the width of a character over this size.

Readers have different fonts. The widths are those of DejaVu Sans, which is wider than most.
"""

_STYLE = """\
text {{ font: 14px system-ui, -apple-system, "Segoe UI", "Noto Sans", sans-serif; fill: {ink} }}
.title {{ font-size: 16px; font-weight: 600 }}
.strong {{ font-weight: 600 }}
.muted {{ fill: {muted}; font-size: 13px }}
.code {{ font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 13px }}
.best-text {{ fill: {best}; font-weight: 600 }}
.panel {{ fill: {panel}; stroke: {line} }}
.chosen {{ fill: {panel}; stroke: {best}; stroke-width: 2 }}
.line {{ stroke: {line}; stroke-width: 1.5; fill: none }}
.whisker {{ stroke: {ink}; stroke-width: 1.5; fill: none }}
.head {{ fill: {line} }}
.other {{ fill: {other} }}
.ours {{ fill: {ours} }}
.best {{ fill: {best} }}
"""


@dataclass
class Figure:
    """A drawing for every theme.

    Attributes:
        title: the name for screen readers.
        description: the content in sentences, for people who cannot see the figure.
        height: in pixels.
    """

    title: str
    description: str
    height: float = 0
    _elements: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, words: str, style: str = "", anchor: str = "start") -> None:
        """Write one line with its base line at ``y``.

        Args:
            x, y: of the anchor.
            words: of the line.
            style: class of the style sheet.
            anchor: the part of the line at ``x``: "start", "middle" or "end".

        Raises:
            ValueError: the line may leave the figure.
        """
        left = x - _width(words, style) * {"start": 0, "middle": 0.5, "end": 1}[anchor]
        if left < 0 or left + _width(words, style) > WIDTH:
            raise ValueError(f"no room for {words!r}: shorten the text, or move it")
        attributes = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}"' + (
            f' class="{style}"' if style else ""
        )
        self._elements.append(f"<text {attributes}>{escape(words)}</text>")

    def rectangle(
        self, x: float, y: float, width: float, height: float, style: str, radius: float = 6
    ) -> None:
        """Draw a box with round corners."""
        place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self._elements.append(f'<rect {place} rx="{radius:g}" class="{style}"/>')

    def path(self, commands: str, style: str) -> None:
        """Draw a path of SVG's commands."""
        self._elements.append(f'<path d="{commands}" class="{style}"/>')

    def arrow(self, x: float, y: float, dx: float = 0, dy: float = 0) -> None:
        """Draw an arrow from a point, straight down by ``dy`` or to the right by ``dx``."""
        self.path(f"M{x:g} {y:g}l{dx:g} {dy:g}", "line")
        tip = "l-5 -8h10z" if dy else "l-8 -5v10z"
        self.path(f"M{x + dx:g} {y + dy:g}{tip}", "head")

    def render(self, theme: str) -> str:
        """Return the file of one theme."""
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-1 -1 {WIDTH + 2} {self.height + 2:g}" '
                f'width="{WIDTH}" height="{self.height:g}" role="img" aria-labelledby="title description">',
                f'<title id="title">{escape(self.title)}</title>',
                f'<desc id="description">{escape(self.description)}</desc>',
                f"<style>\n{_STYLE.format_map(THEMES[theme])}</style>",
                *self._elements,
                "</svg>\n",
            ]
        )


def _width(words: str, style: str) -> float:
    """Return the width of a line in a wide font, in pixels."""
    size, share = SIZES[style]
    return len(words) * size * share
