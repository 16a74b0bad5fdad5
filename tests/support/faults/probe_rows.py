"""Rows of probes that are wrong: what they answer, what they do to their process, and what they bring into a report."""

from __future__ import annotations

USED = "True, 'here'"


def device(**values: str) -> str:
    """A probe whose answer has a device of these values."""
    given = ", ".join(f"{name}={value}" for name, value in {"name": "'Acme 1'", **values}.items())
    return f"return Evidence({USED}, (Device({given}),))"


def fact(source: str, value: str) -> str:
    return f"return Evidence({USED}, (), (Fact({source}, {value}),))"


NO_EVIDENCE = {
    f"an answer that is {what}": (f"return {what}", "expected opgraft.Evidence")
    for what in (
        "None",
        "{}",
        "'here'",
        "True",
        "Evidence",
        "[Evidence(False, 'no')]",
        "open('/dev/zero', 'rb')",
    )
} | {
    "an answer in pieces": (
        "yield Evidence(False, 'no')",
        "returned a generator, expected opgraft.Evidence",
    ),
    "a probe that is no function": ("pass\nprobe = 'here'", "'str' object is not callable"),
    "a probe that takes nothing": (
        "pass\nprobe = lambda: Evidence(False, 'no')",
        "takes 0 positional arguments",
    ),
    "a probe that is waited for": ("pass\nasync def probe(machine): ...", "returned a coroutine"),
}

WRONG_TYPES = {
    "available is None": ("return Evidence(None, 'no')", "True or False for available, got None"),
    "available is a text": ("return Evidence('no', 'no')", "True or False for available, got 'no'"),
    "no reason": ("return Evidence(False, None)", "a string for reason, got None"),
    "a reason of bytes": ("return Evidence(False, b'no')", "a string for reason, got b'no'"),
    "a remedy that is a number": (
        "return Evidence(False, 'no', remedy=3)",
        "a string for remedy, got 3",
    ),
    "devices that are none": (
        f"return Evidence({USED}, None)",
        "opgraft.Device in devices, got None",
    ),
    "devices by name": (
        f"return Evidence({USED}, ('Acme 1',))",
        "opgraft.Device in devices, got ('Acme 1',)",
    ),
    "devices without end": (
        f"return Evidence({USED}, __import__('itertools').repeat(0))",
        "in devices, got repeat(0)",
    ),
    "a hundred thousand devices": (
        f"return Evidence({USED}, (Device('Acme 1'),) * 100_000)",
        "10,000 devices at most, got 100,000",
    ),
    "facts that are pairs": (
        f"return Evidence({USED}, (), (('a', 'b'),))",
        "opgraft.Fact in facts",
    ),
    "a fact of bytes": (fact("'/sys/acme'", "b'1'"), "a source or value that is no string"),
    "a fact without a source": (fact("None", "'1'"), "a source or value that is no string"),
    "a device without a name": (device(name="None"), "that is no string"),
    "a driver that is a number": (device(driver="535"), "that is no string"),
    "less memory than none": (device(memory="-1"), "memory (bytes) or numa_node that none has"),
    "more memory than there is": (
        device(memory="1 << 80"),
        "memory (bytes) or numa_node that none has",
    ),
    "memory that is no number": (device(memory="float('nan')"), "that is no integer"),
    "memory in words": (device(memory="'80 GiB'"), "that is no integer"),
    "a node below all": (device(numa_node="-7"), "numa_node that none has"),
    "an answer that cannot be written down": (
        "class Odd(Evidence):\n        def to_dict(self): return {'available': {1}}\n    return Odd(False, 'no')",
        "its process ended with status 1",
    ),
    "an answer of other keys": (
        "class Odd(Evidence):\n        def to_dict(self): return {'present': True}\n    return Odd(False, 'no')",
        "probe acme_device:SPEC: 'available'",
    ),
}

HARMLESS = {
    "a reason of a million characters": (
        "return Evidence(False, 'x' * 1_000_000)",
        "x… (1,000,000 characters)",
    ),
    "a reason that forges a line": (
        "return Evidence(False, 'no\\nplatform: acme')",
        "no\\nplatform: acme",
    ),
    "a reason that clears the screen": (
        "return Evidence(False, 'no \\x1b[2J\\0')",
        "no \\x1b[2J\\x00",
    ),
    "a reason of half a character": ("return Evidence(False, 'no \\udcff')", "no \\udcff"),
    "a probe that prints": (
        "print('noise' * 1_000_000)\n    return Evidence(False, 'quiet')",
        "quiet",
    ),
    "a probe that closes its output": (
        "import os; os.close(1); os.close(2)\n    return Evidence(False, 'no')",
        "no",
    ),
    "a probe that removes its folder": (
        "import os, shutil; here = os.path.dirname(__file__); shutil.rmtree(here + '/acme_dist-1.0.dist-info')\n"
        "    return Evidence(False, 'removed')",
        "removed",
    ),
    "a probe that removes where it works": (
        "import os, tempfile; here = tempfile.mkdtemp(); os.chdir(here); os.rmdir(here)\n"
        "    return Evidence(False, 'removed')",
        "removed",
    ),
    "a probe in two processes": (
        "import os, time; copy = not os.fork(); copy or time.sleep(0.5)\n"
        "    return Evidence(False, 'a copy' if copy else 'the first')",
        "the first",
    ),
    "a probe that leaves a thread": (
        "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "    return Evidence(False, 'answered')",
        "answered",
    ),
    "a probe that leaves a process": (
        "import subprocess; subprocess.Popen(['sleep', '60'])\n    return Evidence(False, 'answered')",
        "answered",
    ),
    "a probe that limits its parent": (
        "import os, resource; resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (0, 0))\n"
        "    return Evidence(False, 'limited')",
        "limited",
    ),
    "a probe that leaves something for the end": (
        "import atexit, time; atexit.register(time.sleep, 60)\n    return Evidence(False, 'answered')",
        "answered",
    ),
}
"""They answer, and the answer counts."""

ENDS = {
    "a probe that exits": ("raise SystemExit(0)", "raised SystemExit: 0 at"),
    "a probe that is interrupted": (
        "raise KeyboardInterrupt",
        "KeyboardInterrupt, which nobody has sent, at ",
    ),
    "a probe that raises what is no Exception": (
        "raise type('Odd', (BaseException,), {})('odd')",
        "raised Odd: odd at ",
    ),
    "an error without words": (
        "class Bad(Exception):\n        def __str__(self): raise KeyError('no')\n    raise Bad",
        "Bad (its message cannot be printed",
    ),
    "a probe that calls itself": ("return probe(machine)", "raised RecursionError"),
    "a probe that takes all memory": ("return [0] * (1 << 60)", "raised MemoryError"),
    "a probe that ends its process": ("import os; os._exit(3)", "its process ended with status 3"),
    "a probe that aborts": ("import os; os.abort()", "its process ended with status -6"),
    "a probe that kills its parent": (
        "import os, time; os.kill(os.getppid(), 9); time.sleep(60)",
        "its process ended with status -9",
    ),
    "a probe that kills its group": (
        "import os; os.killpg(0, 15)",
        "its process ended with status -15",
    ),
    "a probe that closes everything": (
        "import os; os.closerange(0, 256)\n    return Evidence(False, 'no')",
        "its process ended with status 1",
    ),
    "a probe that answers for itself": (
        "import os\n    for number in range(3, 256):\n        try: os.write(number, b'[')\n"
        "        except OSError: pass\n"
        "    return Evidence(False, 'no')",
        "its answer cannot be read",
    ),
}

SECRETS = {
    "all variables of the machine": "return Evidence(False, str(machine.environ))",
    "each variable by its name": "return Evidence(False, str({k: machine.environ[k] for k in machine.environ}))",
    "a copy of the variables": "return Evidence(False, str({k: v for k, v in machine.environ.copy().items()}))",
    "names that were listed": "return Evidence(False, str([machine.environ[k] for k in list(machine.environ.keys())]))",
    "all that its process has": "import os; return Evidence(False, str(dict(os.environ)))",
    "what its parent was started with": (
        "import os; found = open(f'/proc/{os.getppid()}/environ').read()\n    return Evidence(False, found)"
    ),
    "what another process was started with": (
        "return Evidence(False, open('/proc/' + machine.environ['ACME_PROCESS'] + '/environ').read())"
    ),
    "a fact": "return Evidence(False, 'no', (), (Fact('variables', repr(list(machine.environ.values()))),))",
    "an error": "raise OSError(str(machine.environ))",
    "a remedy": "return Evidence(False, 'no', remedy='set ' + ' '.join(v for _, v in machine.environ.items()))",
}
"""Probes that quote variables which they were not meant to read, and the one of that name which they were."""

ROWS = {
    **{
        name: (probe, words, False)
        for name, (probe, words) in {**NO_EVIDENCE, **WRONG_TYPES, **ENDS}.items()
    },
    **{name: (probe, words, True) for name, (probe, words) in HARMLESS.items()},
}
"""By name: the body of a probe, words of what is told of it, and whether its answer counts."""
