"""Remove the identity of a machine and a user from texts for a bug report."""

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
_ACCOUNT = re.compile(
    r"(?:(?<=//)[^\s/@]+|(?<![\w.+%\\'-])\w[\w.+%\\'-]*)@(?:\[[^\]\s]*\]|\w(?:[\w.-]*\w)?)"
)
"""A user at a host. Drivers name their builder so, and an address may have a password."""
_LONGEST_ID = 40
"""Characters of an id. A UUID has 36, and longer ones name no device."""

_SECRET_KEY = re.compile(r"serial|unique_id|\bs/n\b")
"""A name of a serial number, in lower case."""

_OTHER_HOME = re.compile(r"(?<![\w.~-])(/(?:home|Users)/)[^\s/:;,\"']+")
"""The home folder of another account, as a command by ``sudo`` meets it."""

_NETWORK_CARD = re.compile(r"(?i)(?<![0-9a-f:])(?:[0-9a-f]{2}:){5}[0-9a-f]{2}(?![0-9a-f:])")
"""The address of a network card, which names one machine."""

_DIGITS = "1234567890abcdef"
"""Digits of stand-ins. The zero comes late: a ``unique_id`` of 0 means that there is none."""

_SETTING_ENDS = ("", ",")
"""Characters around a setting, or around an entry of a setting."""


class _Digit:
    """A digit of an id: the stand-in, and the digits that follow in the ids seen so far."""

    def __init__(self, shown: str = "") -> None:
        self.shown = shown
        self.following: dict[str, _Digit] = {}

    def follow(self, digit: str) -> _Digit:
        """Return the digit after this one. A new digit gets the first free one of ``_DIGITS``."""
        if digit not in self.following:
            taken = len(self.following) - ("-" in self.following)
            self.following[digit] = _Digit("-" if digit == "-" else _DIGITS[taken])
        return self.following[digit]


class Scrubber:
    """Replaces ids of devices, serial numbers, the home folder, the host and the account.

    If two ids begin with the same digits, the stand-ins begin with as many equal digits. So a
    variable that names a device by the first digits of the id still names the same device.
    """

    def __init__(self) -> None:
        self._ids = _Digit()
        self._numbers: dict[str, str] = {}
        self._homes = _homes()
        self._host = _host()

    def value(self, text: str) -> str:
        """Scrub the value of a variable, or a sentence that may hold one."""
        text = _IDS.sub(self._shown, text)
        text = _without_accounts(self._without_home(text))
        return self._host.sub(_shown_host, text) if self._host else text

    def text(self, text: str) -> str:
        """Scrub the text of a file. The host's name stays: a probe may look for such a word."""
        lines = [self._line(line) for line in text.split("\n")]
        return _without_accounts(self._without_home("\n".join(lines)))

    def file(self, path: str, text: str) -> str:
        """Scrub the text of the file at ``path``. The name of the file may mean a serial number."""
        name = os.path.basename(path).lower()
        if _SECRET_KEY.search(name) and len(text.split()) == 1:
            return self._secret("unique_id" in name, text)
        return self.text(text)

    def sentence(self, line: str) -> str:
        """Scrub a line for people, as a value and without serial numbers."""
        secret = self._without_secret(line)
        return self.value(line) if secret is None else secret

    def _line(self, line: str) -> str:
        secret = self._without_secret(line)
        return _IDS.sub(self._shown_in_file, line) if secret is None else secret

    def _without_secret(self, line: str) -> str | None:
        """Replace the serial number or ``unique_id`` of a line, or return ``None`` without one."""
        lower = line.lower()
        if not _SECRET_KEY.search(lower):
            return None
        start = _start_of_value(line)
        key_of_line = lower[:start]
        if start == len(line) or not _SECRET_KEY.search(key_of_line):
            return None
        return line[:start] + self._secret("unique_id" in key_of_line, line[start:])

    def _secret(self, is_unique_id: bool, value: str) -> str:
        """Return a stand-in for a serial number or ``unique_id``, within the same blanks.

        AMD names a GPU by a hexadecimal ``unique_id``.
        """
        word = value.strip()
        if not word:
            return value
        before, _, behind = value.partition(word)
        stand_in = self._unique_id(word) if is_unique_id else "0"
        return f"{before}{stand_in}{behind}"

    def _unique_id(self, word: str) -> str:
        # A file has the number in decimal, a variable in hexadecimal digits.
        if re.fullmatch(r"[0-9]{1,20}", word) and int(word):
            digits = self._id(f"{int(word):016x}")
            number = str(int(digits, 16))
            self._numbers[word] = number
            return number
        if re.fullmatch(r"(?i)(0x)?[0-9a-f]{16}", word):
            prefix = word[:-16]
            return prefix + self._id(word[-16:])
        return "0"

    def _id(self, digits: str) -> str:
        """Return the stand-in for an id."""
        at = self._ids
        shown = []
        for digit in digits[:_LONGEST_ID].lower():
            at = at.follow(digit)
            shown.append(at.shown)
        return "".join(shown)

    def _is_known(self, digits: str) -> bool:
        """Return True if an id seen so far begins with these digits."""
        at = self._ids
        for digit in digits[:_LONGEST_ID].lower():
            if digit not in at.following:
                return False
            at = at.following[digit]
        return True

    def _shown(self, match: re.Match[str]) -> str:
        bare = match["bare"]
        if not bare:
            return (match["kind"] or "") + self._id(match["named"] or match["uuid"])
        if bare in self._numbers:
            return self._numbers[bare]
        # Eight hexadecimal digits may be any number, so only known ids are replaced.
        return self._id(bare) if self._is_known(bare) else bare

    def _shown_in_file(self, match: re.Match[str]) -> str:
        """Scrub as in a variable, except for numbers and short words such as GPU-0."""
        if match["bare"] or len(match["named"] or match["uuid"]) < 8:
            return match[0]
        return self._shown(match)

    def _without_home(self, text: str) -> str:
        for home in self._homes:
            text = re.sub(rf"{re.escape(home)}(?![\w-]|\.\w)", "~", text)
        return _OTHER_HOME.sub(r"\1user", text)


def _without_accounts(text: str) -> str:
    """Replace each user at a host, as in a driver's version, and addresses of network cards."""
    return _NETWORK_CARD.sub("00:00:00:00:00:00", _ACCOUNT.sub("user@host", text))


def _start_of_value(line: str) -> int:
    """Return the place of the value in ``Serial : x``, ``serial=x`` or ``unique_id 1``.

    Without a value, the place is the end of the line.
    """
    separator = re.search(r"[:=]", line)
    if separator:
        return separator.end()
    key = r"(?i)(?:serial|unique_id)\w*(?:[ \t](?:number|no\.?|id)(?![^ \t]))?"
    # A key stands at the beginning, and a line of a binary file may be long.
    word = re.search(key, line[:200])
    return word.end() if word else len(line)


def _homes() -> list[str]:
    """Return the spellings of the home folder, longest first. ``/`` does not count."""
    try:
        found = {str(Path.home()), os.environ.get("HOME", "").rstrip("/")}
    except RuntimeError:
        return []
    homes = [home for home in found if home.startswith("/") and home.strip("/")]
    return sorted(homes, key=len, reverse=True)


def _host() -> re.Pattern[str] | None:
    """Return the pattern that finds the host's name, or ``None`` for a number or a short name."""
    full = socket.gethostname()
    short, _, _ = full.partition(".")
    names = [name for name in (full, short) if len(name) > 2 and not name.isdigit()]
    if not names:
        return None
    either = "|".join(map(re.escape, names))
    return re.compile(rf"(?<![\w-])(?:{either})(?![\w-])")


def _shown_host(match: re.Match[str]) -> str:
    """Return the stand-in for the host's name.

    A plain word as the whole value, or as an entry of a list, is a setting and stays.
    """
    before = match.string[: match.start()].rstrip()
    after = match.string[match.end() :].lstrip()
    stands_alone = before[-1:] in _SETTING_ENDS and after[:1] in _SETTING_ENDS
    is_setting = match[0].isalpha() and stands_alone
    return match[0] if is_setting else "host"
