"""The program that stands for an interpreter; see ``interpreter.py``. It imports nothing that takes long."""

import array
import json
import os
import signal
import socket
import sys

with open(os.path.join(os.path.dirname(sys.argv[0]), "settings.json")) as file:  # pathlib takes long
    SETTINGS = json.load(file)


def is_served(arguments: list[str], environ: dict[str, str]) -> bool:
    """Tell whether the server does what an interpreter would: code, a module or a file, and no other start."""
    at_start = {
        name: value
        for name, value in environ.items()
        if name.startswith(tuple(SETTINGS["at_start"])) and name not in ("PYTHONPATH", "PYTHONIOENCODING")
    }
    known = arguments[:1] == ["-I"] or arguments[:1] in (["-c"], ["-m"]) or not (arguments or ["-"])[0].startswith("-")
    return known and at_start == SETTINGS["environ"]


def inherited_files() -> list[int]:
    """Return the open files that an interpreter in this place would have."""
    found = []
    for name in os.listdir("/proc/self/fd"):  # pathlib takes long
        try:
            if os.get_inheritable(int(name)):
                found.append(int(name))
        except OSError:  # that of the listing itself
            continue
    return found


def served(arguments: list[str], environ: dict[str, str]) -> int:
    """Have the server run it; returns the exit code, negative for a signal."""
    files = inherited_files()
    request = {"arguments": arguments, "environ": environ, "folder": os.getcwd(), "files": files}
    data = json.dumps({**request, "executable": sys.argv[0]}).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(SETTINGS["address"])
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))
        server.sendmsg([len(data).to_bytes(8, "little")], [rights])
        server.sendall(data)
        return int(server.recv(16))


def main() -> None:
    """End as the process ends that the server forks."""
    arguments, environ = sys.argv[1:], dict(os.environ)
    if not is_served(arguments, environ):
        os.execv(SETTINGS["python"], [SETTINGS["python"], *arguments])  # noqa: S606
    code = served(arguments, environ)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


main()
