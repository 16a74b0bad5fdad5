"""The program that stands for an interpreter; see ``interpreter.py``. It imports nothing that takes long.

So ``pathlib``, ``json``, ``signal`` and ``socket`` are not for it, which take as long as the rest of its start.
"""

import _signal as signal
import _socket as socket
import array
import marshal
import os
import sys

with open(os.path.join(os.path.dirname(sys.argv[0]), "settings"), "rb") as file:
    SETTINGS = marshal.load(file)  # noqa: S302  # of these tests


HANDED_ON = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def is_served(arguments: list[str], environ: dict[str, str]) -> bool:
    """Tell whether the server does what an interpreter would: code, a module or a file, no other start or opgraft."""
    at_start = {
        name: value
        for name, value in environ.items()
        if name.startswith(tuple(SETTINGS["at_start"])) and name not in SETTINGS["later"]
    }
    folders = filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))
    other = any(os.path.isdir(os.path.join(folder, "opgraft")) for folder in folders)
    known = (arguments or ["-"])[0] in ("-I", "-u", "-c", "-m") or not (arguments or ["-"])[
        0
    ].startswith("-")
    same_start = at_start == SETTINGS["environ"] or is_child(arguments, at_start)
    return known and not other and same_start


def is_child(arguments: list[str], at_start: dict[str, str]) -> bool:
    """Tell whether isolated code asks for a child, and none of the few variables that it has is another one."""
    named = os.path.basename(sys.argv[0]) == SETTINGS["for_children"]
    usual = {**SETTINGS["environ"], "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    return named and arguments[:1] == ["-I"] and at_start.items() <= usual.items()


def inherited_files() -> list[int]:
    """Return the open files that an interpreter in this place would have."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.get_inheritable(int(name)):
                found.append(int(name))
        except OSError:  # that of the listing itself
            continue
    return found


def stand_for(pid: int) -> None:
    """Hand signals on to the process that the server forked, and show its number as this one's name."""
    with open("/proc/self/comm", "w") as name:
        name.write(str(pid))
    for number in HANDED_ON:
        signal.signal(number, lambda number, frame: os.kill(pid, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDED_ON)


def served(arguments: list[str], environ: dict[str, str]) -> int:
    """Have the server run it; returns the exit code, negative for a signal."""
    files = inherited_files()
    request = {"arguments": arguments, "environ": environ, "folder": os.getcwd(), "files": files}
    data = marshal.dumps({**request, "executable": sys.argv[0]})
    server = socket.socket(socket.AF_UNIX)
    server.connect(SETTINGS["address"])
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))
    server.sendmsg([len(data).to_bytes(8, "little")], [rights])
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDED_ON)
    server.sendall(data)
    stand_for(int.from_bytes(server.recv(8), "little"))
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
