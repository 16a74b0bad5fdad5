"""What a recorded machine, a secret and a full disk can do to the processes that probes run in."""

from __future__ import annotations

import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import opgraft
import pytest
from opgraft.errors import ChildError
from opgraft.machine.child import ask_child, child_command, run_child
from opgraft.machine.machine import RECORD, Machine
from support.machines.build import Tree, build

TELLS = (
    "import json, os; return Evidence(False, json.dumps([machine.environ.get('DEVICE'), sorted(machine.environ), "
    "sorted(os.environ)]))"
)


def told(cli, *arguments: str, **variables: str) -> list:
    """What the probe of the platform ``acme`` saw: a variable, the machine's variables, its process's variables."""
    result = cli("detect", "--json", *arguments, **variables)
    assert result.returncode == 0, result.stderr
    candidates = json.loads(result.stdout)["decision"]["candidates"]
    return json.loads(next(c["reason"] for c in candidates if c["name"] == "acme"))


def with_variables(root: Path, **variables: str) -> None:
    record = json.loads((root / RECORD).read_text())
    record["environ"] |= variables
    (root / RECORD).write_text(json.dumps(record))


@pytest.fixture
def bomb(tmp_path: Path) -> tuple[Path, Path]:
    """A shared library, and the file that it writes as soon as a process loads it."""
    source, library, trace = tmp_path / "bomb.c", tmp_path / "bomb.so", tmp_path / "exploded"
    source.write_text(
        f'#include <stdio.h>\n__attribute__((constructor)) static void go(void) {{ fopen("{trace}", "w"); }}\n'
    )
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    subprocess.run([sys.executable, "-c", ""], env={"LD_PRELOAD": str(library)}, check=True)
    assert trace.exists(), "the attack works where it is not warded off"
    trace.unlink()
    return library, trace


def test_variables_of_a_recording_are_data(
    site, cli, tmp_path: Path, bomb: tuple[Path, Path]
) -> None:
    """A probe is told the variables of a recorded machine, and none of them reaches the process that it runs in."""
    library, trace = bomb
    root = build("cpu-avx2", tmp_path / "machine")
    with_variables(root, LD_PRELOAD=str(library), DEVICE="7")
    site.platform("acme", probe=TELLS)
    value, variables, own = told(cli, "--root", str(root))
    assert value == "7"
    assert "LD_PRELOAD" in variables
    assert "LD_PRELOAD" not in own
    assert not trace.exists()


def test_a_probe_is_told_no_secret(site, cli) -> None:
    """On this machine a probe sees the variables that decide, and neither it nor its process those with secrets."""
    site.platform("acme", probe=TELLS)
    secrets = {
        "HF_TOKEN": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "DB_PASSWORD": "x",
        "OPENAI_API_KEY": "x",
    }
    value, variables, own = told(cli, DEVICE="3", **secrets)
    assert value == "3"
    assert not set(secrets) & {*variables, *own}
    assert set(own) <= {
        "PATH",
        "HOME",
        "LANG",
        "LC_ALL",
        "LC_CTYPE",
        "TMPDIR",
        "LD_LIBRARY_PATH",
    } | {"TORCH_DEVICE_BACKEND_AUTOLOAD"}


def test_links_do_not_lead_out_of_a_recorded_tree(cli, tmp_path: Path) -> None:
    """Whatever a tree links to outside of itself is not read, not listed, and not written into a new recording."""
    root, recording = build("nvidia-4-h100", tmp_path / "machine"), tmp_path / "recording"
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "id_rsa").write_text("model name : private-key\nprocessor : 0\n")
    for path in ("proc/cpuinfo", "proc/meminfo"):
        (root / path).unlink()
    (root / "proc/cpuinfo").symlink_to(outside / "id_rsa")
    (root / "proc/meminfo").symlink_to("../../outside/id_rsa")
    tree = Tree(root)
    tree.add_pci("0000:ff:00.0", 0x9999, 0x4001, 0x038000)
    (root / "sys/bus/pci/devices/0000:fe:00.0").symlink_to(outside)
    result = cli("detect", "--all", "--root", str(root), "--record", str(recording))
    assert result.returncode == 0, result.stderr
    assert "private-key" not in result.stdout
    assert "/proc/cpuinfo: could not be read" in result.stdout
    written = [path for path in recording.rglob("*") if path.is_file()]
    assert [path for path in written if "private-key" in path.read_text()] == []
    machine = Machine.recorded(root)
    assert machine.names("/sys/bus/pci/devices/0000:fe:00.0") == []
    assert not machine.exists("/sys/bus/pci/devices/0000:fe:00.0/id_rsa")
    assert not machine.may_open("/proc/cpuinfo")
    assert machine.link("/sys/bus/pci/devices/0000:fe:00.0/../x") is None


def test_links_inside_of_a_tree_are_followed(tmp_path: Path) -> None:
    """Where a recording was unpacked does not matter, and its own links lead to what they led to."""
    (tmp_path / "real/sys/a").mkdir(parents=True)
    (tmp_path / "real/sys/a/value").write_text("1")
    (tmp_path / "real/sys/b").symlink_to("a")
    (tmp_path / "root").symlink_to("real")
    assert Machine(tmp_path / "root", {}, packages={}).read("/sys/b/value") == "1"


def no_file_can_be_written() -> None:
    """As on a full disk: every write to a file fails, whichever folder it lies in."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


@pytest.mark.parametrize("command", [("ops", "explain", "rms_norm"), ("detect", "--all")])
def test_without_a_usable_temporary_folder(site, command: tuple[str, ...]) -> None:
    """Detection asks a plugin's probe, and ops are bound, where no file can be written anywhere."""
    site.platform("acme", probe="return Evidence(False, 'looked at')")
    environ = {**os.environ, "PYTHONPATH": str(site.folder), "PYTHONDONTWRITEBYTECODE": "1"}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            env=environ,
            capture_output=True,
            text=True,
            check=False,
            preexec_fn=no_file_can_be_written,  # nothing else runs in this process
        )

    assert (
        "No usable temporary directory"
        in run("-c", "import tempfile; tempfile.gettempdir()").stderr
    )
    result = run("-m", "opgraft", *command)
    assert result.returncode == 0, result.stderr
    assert "looked at" in result.stdout


def test_a_child_of_the_child_holds_nobody_up() -> None:
    """An answer is there when the child has ended, whatever goes on holding its pipes."""
    code = (
        "import os, subprocess\nsubprocess.Popen(['sleep', '30'], pass_fds=(reply_to,))\n"
        "os.write(reply_to, b'[1]')\nprint('done', flush=True)"
    )
    assert ask_child(code, time_limit=8.0) == [1]


LEFT = {
    "a process": "subprocess.Popen(['sleep', '60'], stdout=-3)",
    "one of its own session": "subprocess.Popen(['sleep', '60'], stdout=-3, start_new_session=True)",
    "one that nobody is the parent of": (
        "subprocess.Popen(['setsid', 'sh', '-c', 'setsid sleep 60 & echo $! > {pid}'], stdout=-3)"
    ),
}
"""Processes that code of others starts and leaves behind, each with 60 seconds to live."""


@pytest.mark.parametrize("left", LEFT)
def test_what_a_child_leaves_behind_ends_too(tmp_path: Path, left: str) -> None:
    """A process that it has started does not outlive its answer."""
    pid = tmp_path / "pid"
    code = (
        f"import subprocess, time\nstarted = {LEFT[left].format(pid=pid)}\n"
        + (
            "started.wait()\n"
            if "{pid}" in LEFT[left]
            else f"open({str(pid)!r}, 'w').write(str(started.pid))\n"
        )
        + "with open(reply_to, 'w') as pipe: json.dump(1, pipe)"
    )
    assert ask_child(code, time_limit=20.0) == 1
    started = int(pid.read_text())
    wait_until(lambda: not _runs(started))


@pytest.mark.parametrize(
    ("deed", "status"),
    [
        ("os.kill(os.getppid(), 9); import time; time.sleep(60)", -signal.SIGKILL),
        ("os.kill(os.getppid(), 15); import time; time.sleep(60)", -signal.SIGTERM),
        ("os.killpg(0, 9)", -signal.SIGKILL),
        ("import resource; resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (0, 0))", 0),
        ("os.kill(os.getpid(), 11)", -signal.SIGSEGV),
        ("os.abort()", -signal.SIGABRT),
        ("os.kill(os.getpid(), 2)", -signal.SIGINT),
        ("os._exit(7)", 7),
    ],
)
def test_what_a_child_does_to_its_parent(deed: str, status: int) -> None:
    """It finds a process there that is not this one; how it ended itself is told as it was."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert run_child(deed, time_limit=20.0).status == status
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == limits


TAKES_MEMORY_LATE = """
while int(open("/proc/self/schedstat").read().split()[1]) < 1.6e9: pass
taken = b"x" * (64 << 20)
while True: pass
"""
"""Takes memory when it has waited for a processor for more than half of three seconds."""


@pytest.mark.slow  # it keeps a processor busy, which the tests beside it need
def test_a_child_that_got_no_processor_is_not_to_blame() -> None:
    """On one that others keep busy it is late, which is told, and no reason for quarantine; to take memory is one."""
    processor = max(os.sched_getaffinity(0))
    pinned = f"import os; os.sched_setaffinity(0, {{{processor}}})\n"
    # In sessions of their own: a kernel that schedules by session would give them one share together.
    busy = [sys.executable, "-c", f"{pinned}while True: pass"]
    others = [subprocess.Popen(busy, start_new_session=True) for _ in range(4)]
    try:
        idle = run_child("import time; time.sleep(60)", time_limit=1.0)
        late = run_child(f"{pinned}os.nice(19)\nwhile True: pass", time_limit=3.0)
        large = run_child(
            f"{pinned}os.nice(5)\n{TAKES_MEMORY_LATE}", time_limit=3.0, memory_limit=48 << 20
        )
    finally:
        for process in others:
            process.kill()
            process.wait()
    assert (idle.status, idle.starved, idle.died) == (None, False, True)
    assert (late.status, late.starved, late.died) == (None, True, False)
    assert (large.status, large.starved, large.died, large.memory > 48 << 20) == (
        None,
        False,
        True,
        True,
    )


@pytest.mark.parametrize(
    ("end", "deed", "session"),
    [
        ("SIGINT", "import time; time.sleep(60)", False),
        ("SIGTERM", "import time; time.sleep(60)", True),
        ("SIGHUP", "import time; time.sleep(60)", False),
        ("SIGKILL", "import time; time.sleep(60)", True),
        ("SIGKILL", "import itertools; sum(itertools.repeat(0))", False),
    ],
)
def test_a_child_ends_with_its_parent(tmp_path: Path, end: str, deed: str, session: bool) -> None:
    """It has a session of its own, and would go on where its parent is ended in any way; so would what it started.

    No thread of it can run while it is in a function of C.
    """
    trace = tmp_path / "pids"
    code = (
        f"import subprocess; os.mkfifo({str(trace)!r}); "
        f"started = subprocess.Popen(['sleep', '60'], start_new_session={session}).pid; "
        f"open({str(trace)!r}, 'w').write(f'{{os.getpid()}} {{started}}'); {deed}"
    )
    parent = f"from opgraft.machine.child import run_child; run_child({code!r}, time_limit=50)"
    with subprocess.Popen([sys.executable, "-c", parent], stderr=subprocess.DEVNULL) as process:
        while not trace.exists():
            assert process.poll() is None
            time.sleep(0.02)
        pids = list(map(int, trace.read_text().split()))
        process.send_signal(getattr(signal, end))
        process.wait(60)
    assert len(pids) == 2
    wait_until(lambda: not any(map(_runs, pids)))


def wait_until(true: Callable[[], bool]) -> None:
    """Wait for what comes soon."""
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    """Tell whether a process is there, and not only its exit status, which nobody may have asked for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_much_is_handed_over_and_much_comes_back() -> None:
    """Neither side waits for the other where both fill their pipes; one that never reads is no reason to wait."""
    data = ["x" * 100] * 20_000
    code = "print('noise' * 100_000, flush=True)\nwith open(reply_to, 'w') as pipe: json.dump(data, pipe)"
    assert ask_child(code, data=data) == data
    assert run_child("import os; os._exit(3)", data=data).status == 3
    flood = "import os\nwhile True: os.write(reply_to, b'x' * 65536)"
    assert run_child(flood, time_limit=1.0).status is None


def test_of_what_is_heard_the_last_line_is_kept() -> None:
    """However much has come before, which whoever hears it has, the reply is the last line."""
    heard: list[bytes] = []
    code = (
        "with open(reply_to, 'wb') as pipe:\n    for _ in range(3): pipe.write(b'x' * (1 << 23) + b'\\n')\n"
        "    pipe.write(b'the last line\\n')"
    )
    ended = run_child(code, heard=heard.append)
    assert (ended.status, ended.reply) == (0, "the last line\n")
    assert sum(map(len, heard)) == 3 * (2**23 + 1) + len(ended.reply)


NEEDED = 10
"""Files that a process has to open to ask a child, at most."""


@pytest.mark.parametrize("left", range(12))
def test_a_process_that_may_open_few_files(left: int) -> None:
    """A child is asked, or an error says why it cannot be; no file stays open."""
    opened = sorted(map(int, os.listdir("/proc/self/fd")))[:-1]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = (number for number in itertools.count() if number not in opened)
    limit = next(itertools.islice(free, left, None))
    failed = ""
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        assert ask_child("open(reply_to, 'w').write('3')") == 3
    except ChildError as error:
        failed = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert bool(failed) <= (left < NEEDED)
    assert bool(failed) >= (left < NEEDED - 4)
    assert not failed or "Too many open files" in failed
    assert sorted(map(int, os.listdir("/proc/self/fd")))[:-1] == opened


def test_one_place_builds_the_command_line_of_a_child() -> None:
    """Whoever starts an interpreter asks ``child_command``; kept results alone name it besides."""
    package = Path(opgraft.__file__).parent
    sources = [file for file in package.rglob("*.py") if file.is_file()]
    files = [file for file in sources if "sys.executable" in file.read_text("utf-8")]
    names = sorted(str(file.relative_to(package)) for file in files)
    assert names == ["cli/kept_results.py", "machine/child.py"]


def test_children_import_as_this_process_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The command line has the path, without entries that imports pass over, and where bytecode goes."""
    monkeypatch.setattr(sys, "path", ["first", Path("passed over"), "second"])
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))
    code = (
        "import os; os.write(1, json.dumps([sys.path, sys.pycache_prefix, sys.argv[2:]]).encode())"
    )
    told = subprocess.run(child_command(code, "a", "b"), capture_output=True, check=True).stdout
    assert json.loads(told) == [["first", "second"], str(tmp_path), ["a", "b"]]
