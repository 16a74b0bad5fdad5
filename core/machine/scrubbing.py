"""Taking out of text what identifies one machine or its user, so that it can stand in a bug report."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

_IDS = re.compile(
    r"(?i)(?<![0-9a-z])(?:(?P<kind>(?:MIG-)?GPU-|MIG-)(?P<named>[0-9a-f][0-9a-f-]*)"
    r"|(?P<uuid>[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})"
    r"|(?P<bare>[0-9a-f]{8}[0-9a-f-]*))(?![0-9a-z])"
)
_ACCOUNT = re.compile(r"(?<![\w.+-])[A-Za-z0-9_][\w.+-]*@[A-Za-z0-9_](?:[\w.-]*\w)?")
"""A user at a host, as builds of drivers and kernels write down who made them where."""
_LONGEST_ID = 40  # characters; a UUID has 36, and what is longer names no device
_SECRET_KEYS = ("serial", "unique_id")
_DIGITS = "1234567890abcdef"  # the zero comes late: a unique_id of 0 would mean that there is none


class _Digit:
    """A digit of an id: what stands for it, and the digits that follow it in the ids seen so far."""

    def __init__(self, shown: str = "") -> None:
        self.shown = shown
        self.following: dict[str, _Digit] = {}

    def follow(self, digit: str) -> _Digit:
        """Return the digit after this one; a new one is shown as the first of ``_DIGITS`` that is not taken here."""
        if digit not in self.following:
            taken = len(self.following) - ("-" in self.following)
            self.following[digit] = _Digit("-" if digit == "-" else _DIGITS[taken])
        return self.following[digit]


class Scrubber:
    """Replaces what identifies one machine or its user: ids of devices, serial numbers, home folder, host and account.

    Two ids that begin with the same digits are shown with as many equal digits, and the others differ: whatever a
    variable names by an id or by its first digits, it goes on naming it, and a prefix of two ids stays one of both.
    """

    def __init__(self) -> None:
        self._ids = _Digit()
        self._numbers: dict[str, str] = {}
        self._homes = _homes()
        self._host = _host()

    def value(self, text: str) -> str:
        """Scrub the value of a variable, or a sentence that may hold one."""
        text = _without_accounts(self._without_home(_IDS.sub(self._shown, text)))
        return self._host.sub(_shown_host, text) if self._host else text

    def text(self, text: str) -> str:
        """Scrub the text of a file. It keeps the host's name, which may be a word that a probe looks for."""
        return _without_accounts(self._without_home("\n".join(map(self._line, text.split("\n")))))

    def file(self, path: str, text: str) -> str:
        """Scrub the text of the file at ``path``, whose name may be what says that it is a serial number."""
        name = os.path.basename(path).lower()
        if any(key in name for key in _SECRET_KEYS) and len(text.split()) == 1:
            return self._secret("unique_id" in name, text)
        return self.text(text)

    def sentence(self, line: str) -> str:
        """Scrub a line that people read: as a value, and without serial numbers."""
        secret = self._without_secret(line)
        return self.value(line) if secret is None else secret

    def _line(self, line: str) -> str:
        secret = self._without_secret(line)
        return _IDS.sub(self._shown_in_file, line) if secret is None else secret

    def _without_secret(self, line: str) -> str | None:
        """Replace the serial number or ``unique_id`` that a line gives; ``None`` where it gives none."""
        lower = line.lower()
        if not any(key in lower for key in _SECRET_KEYS):
            return None
        start = _start_of_value(line)
        if start == len(line) or not any(key in lower[:start] for key in _SECRET_KEYS):
            return None
        return line[:start] + self._secret("unique_id" in lower[:start], line[start:])

    def _secret(self, unique: bool, value: str) -> str:
        """Return a stand-in for a serial number, or for a ``unique_id``, AMD's hexadecimal name of a GPU."""
        blanks = value[: len(value) - len(value.lstrip())]
        end = value[len(value.rstrip()) :] if value.strip() else ""
        word = value.strip()
        if unique and re.fullmatch(r"[0-9]{1,20}", word) and int(word):
            digits = self._id(f"{int(word):016x}")
            shown = self._numbers[word] = str(int(digits, 16))
            return f"{blanks}{shown}{end}"
        if unique and re.fullmatch(r"(?i)(0x)?[0-9a-f]{16}", word):
            return f"{blanks}{word[:-16]}{self._id(word[-16:])}{end}"
        return f"{blanks}0{end}" if word else value

    def _id(self, digits: str) -> str:
        at, shown = self._ids, []
        for digit in digits[:_LONGEST_ID].lower():
            at = at.follow(digit)
            shown.append(at.shown)
        return "".join(shown)

    def _known(self, digits: str) -> bool:
        at: _Digit | None = self._ids
        for digit in digits[:_LONGEST_ID].lower():
            at = at.following.get(digit) if at else None
        return at is not None

    def _shown(self, match: re.Match[str]) -> str:
        if match["bare"]:
            other = self._id(match["bare"]) if self._known(match["bare"]) else match["bare"]
            return self._numbers.get(match["bare"], other)
        return (match["kind"] or "") + self._id(match["named"] or match["uuid"])

    def _shown_in_file(self, match: re.Match[str]) -> str:
        """Scrub as in a variable, but for what may be a number or a word, such as GPU-0."""
        if match["bare"] or len(match["named"] or match["uuid"]) < 8:
            return match[0]
        return self._shown(match)

    def _without_home(self, text: str) -> str:
        for home in self._homes:
            text = re.sub(rf"{re.escape(home)}(?![\w-]|\.\w)", "~", text)
        return text


def _without_accounts(text: str) -> str:
    """Replace each user at a host, such as ``builder@machine`` in a driver's version."""
    return _ACCOUNT.sub("user@host", text)


def _start_of_value(line: str) -> int:
    """Find where the value begins in ``Serial : x``, ``serial=x`` or ``unique_id 1``; none is at the line's length."""
    separator = re.search(r"[:=]", line)
    if separator:
        return separator.end()
    word = re.search(
        r"(?i)(?:serial|unique_id)\w*(?:[ \t](?:number|no\.?|id)(?![^ \t]))?", line[:200]
    )
    return word.end() if word else len(line)


def _homes() -> list[str]:
    """Return the home folder as it may be spelled; none where it is not known or is the root folder."""
    try:
        found = {str(Path.home()), os.environ.get("HOME", "").rstrip("/")}
    except RuntimeError:
        return []
    return sorted(
        (home for home in found if home.startswith("/") and home.strip("/")), key=len, reverse=True
    )


def _host() -> re.Pattern[str] | None:
    """Return the pattern that finds the host's name; none where it is a number or too short to tell a machine."""
    full = socket.gethostname()
    names = [
        name for name in (full, full.partition(".")[0]) if len(name) > 2 and not name.isdigit()
    ]
    return (
        re.compile(rf"(?<![\w-])(?:{'|'.join(map(re.escape, names))})(?![\w-])") if names else None
    )


def _shown_host(match: re.Match[str]) -> str:
    """Return the stand-in for the host's name; where a plain word is the value or an entry of it, it is a setting."""
    before, after = match.string[: match.start()].rstrip(), match.string[match.end() :].lstrip()
    setting = match[0].isalpha() and before[-1:] in ("", ",") and after[:1] in ("", ",")
    return match[0] if setting else "host"
