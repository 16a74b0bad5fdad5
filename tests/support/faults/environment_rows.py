"""Rows of environments in which a command has to make do: streams, folders, variables, limits and files of settings."""

from __future__ import annotations

FINE = (0, "")
NOT_WRITTEN = (1, "error: the answer cannot be written to stdout: No space left on device")
NO_FILE = "cannot be read: it is no regular file"

STREAMS = {
    "no standard output": ("{} >&-", FINE),
    "no standard error": ("{} 2>&- >/dev/null", FINE),
    "no standard input": ("{} <&-", FINE),
    "no standard stream": ("{} <&- >&- 2>&-", FINE),
    "a full standard output": ("{} >/dev/full", NOT_WRITTEN),
    "a full standard error": ("{} 2>/dev/full", FINE),
    "a reader that leaves": ("set -o pipefail; {} | true", FINE),
    "a reader of one line": ("set -o pipefail; {} | head -n 1 >/dev/null", FINE),
}

SURROUNDINGS = {
    "one column": ("COLUMNS=1 {}", FINE),
    "no column": ("COLUMNS=0 {}", FINE),
    "columns that are no number": ("COLUMNS=wide {}", FINE),
    "a locale of Latin-1": ("LC_ALL=C PYTHONUTF8=0 PYTHONIOENCODING=latin-1 {}", FINE),
    "a locale that is not there": ("LC_ALL=xx_YY.klingon {}", FINE),
    "no home": ("env -u HOME {}", FINE),
    "a home that is none": ("HOME=/dev/null {}", FINE),
    "a home that nobody knows": ("HOME='~' XDG_STATE_HOME= {}", FINE),
    "no folder for states": ("XDG_STATE_HOME=/dev/null {}", FINE),
    "no folder for temporary files": ("TMPDIR=/nowhere {}", FINE),
    "no path": ("PATH= {}", FINE),
    "a working folder that was removed": ("mkdir gone && cd gone && rmdir ../gone && {}", FINE),
    "few open files": ("ulimit -n 16; {}", FINE),
    "no room for files": ("ulimit -f 0; {}", FINE),
    "little room in memory": ("ulimit -v 400000; {}", FINE),
    "a small stack": ("ulimit -s 256; {}", FINE),
    "a home that takes no file": ("HOME=/proc XDG_STATE_HOME= XDG_CACHE_HOME= {}", FINE),
    "a folder for states that takes no file": ("XDG_STATE_HOME=/proc {}", FINE),
    "a folder for temporary files that takes none": ("TMPDIR=/proc {}", FINE),
    "a zipped opgraft": ("PYTHONPATH=$ZIPPED:$PYTHONPATH {}", FINE),
    "no documentation in memory": ("PYTHONOPTIMIZE=2 {}", FINE),
    "warnings that are errors": ("PYTHONWARNINGS=error {}", FINE),
}

FILES = {
    "settings from a pipe": ("mkfifo pipe && OPGRAFT_CONFIG=pipe {}", (2, NO_FILE)),
    "settings from a device": ("OPGRAFT_CONFIG=/dev/zero {}", (2, NO_FILE)),
    "settings from a folder": ("OPGRAFT_CONFIG=/ {}", (2, "cannot be read: Is a directory")),
    "settings without end": (
        "head -c 2000000 /dev/zero > many.toml; OPGRAFT_CONFIG=many.toml {}",
        (2, "it is larger"),
    ),
    "a lockfile that is a pipe": (
        "mkfifo pipe && OPGRAFT_LOCKFILE=pipe {}",
        (2, "it is no regular file"),
    ),
    "a lockfile that is a device": ("OPGRAFT_LOCKFILE=/dev/zero {}", (2, "it is no regular file")),
    "a lockfile that is empty": ("touch empty && OPGRAFT_LOCKFILE=empty {}", (2, "cannot be used")),
    "a variable that nobody knows": (
        "OPGRAFT_PLUGIN=acme {}",
        (2, "unknown environment variable OPGRAFT_PLUGIN"),
    ),
    "a flag that is none": ("OPGRAFT_STRICT=perhaps {}", (2, "is not a flag")),
    "a plugin that is not installed": ("OPGRAFT_PLUGINS=acmee {}", (2, "did you mean 'acme'")),
}

SMALL = "mkdir small && unshare -rm bash -c 'mount -t tmpfs -o size=8k small small; cat /dev/zero > small/all; {}'"
"""A folder whose disk is full; ``cat`` says so."""

PROBED = "at acme_device:SPEC: looked at"
LOCK = "plugins lock --output"

LIMITS = {
    "no further process": (
        "ulimit -u 1; {}",
        {
            "detect": (0, "acme: probe acme_device:SPEC: no child process could be started"),
            "plugins doctor": (
                4,
                "the plugins cannot be tried in a process of their own: no child process could be",
            ),
            f"{LOCK} lock": (0, "written to lock"),
        },
    ),
    "few files": ("ulimit -n 24; {}", {"detect --all": (0, PROBED), "plugins list": (0, "acme")}),
    "hardly any file": (
        "ulimit -n 9; {}",
        {
            "detect --all": (
                0,
                "no child process could be started: [Errno 24] Too many open files",
            ),
            "plugins list": (0, "acme"),
        },
    ),
    "no file of any size": (
        "ulimit -f 0; {}",
        {
            "detect --all": (0, PROBED),
            f"{LOCK} lock": (2, "the lockfile lock cannot be written: File too large"),
        },
    ),
    "a full folder for temporary files": (
        SMALL.replace("{}", "TMPDIR=$PWD/small {}"),
        {
            "detect --all": (0, PROBED),
            "plugins doctor": (0, "nothing wrong"),
            f"{LOCK} lock": (0, "written to lock"),
        },
    ),
    "a full folder for what is kept": (
        SMALL.replace("{}", "XDG_STATE_HOME=$PWD/small XDG_CACHE_HOME=$PWD/small {}"),
        {
            "plugins doctor": (0, "nothing wrong"),
            f"{LOCK} small/lock": (
                2,
                "the lockfile small/lock cannot be written: No space left on device",
            ),
            "tune relu2": (2, "tuning.json cannot be written: No space left on device"),
        },
    ),
}
"""By name: a line for a shell with a command in it; by command, its exit code and words of what it prints."""

ROWS = {**STREAMS, **SURROUNDINGS, **FILES}
"""By name: a line for a shell with a command in it, and its exit code with words of what it prints."""

COMMANDS = ("detect", "plugins list", "plugins show acme", "detect --json")
