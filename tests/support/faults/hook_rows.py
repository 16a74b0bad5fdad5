"""Rows of faults in plugins as they are loaded: what they are, what their hooks return, what they register."""

from __future__ import annotations

HEAD = """
import opgraft, itertools
from opgraft.ops import RMSNorm, SiluAndMul
platforms = "any"
class Acme(SiluAndMul):
    def forward_oot(self, x):
        return SiluAndMul.forward_native(self, x)
"""


def hook(name: str, body: str) -> str:
    """A plugin with one hook."""
    return f"{HEAD}@opgraft.hookimpl\ndef {name}():\n    {body}\n"


def veto(body: str) -> str:
    return hook("opgraft_veto", body)


def registers(body: str) -> str:
    return hook("opgraft_register_ops", body)


def stated(platforms: str) -> str:
    """A plugin that states its platforms in that way."""
    return f"{veto('pass')}\nplatforms = {platforms}\n"


ADAPTER = "opgraft.Adapter('acme', SiluAndMul, lambda module: None)"
ANY_STR = "class Text(str):\n        def __{}__(self, *_): raise OSError('no text')\n    return Text('old driver')"
HOSTILE = (
    "class Bad(Exception):\n        def __{}__(self, *_): raise KeyError('no')\n    raise Bad('x')"
)

VETO_ROWS = {
    "a veto whose text cannot be shown": (veto(ANY_STR.format("str")), "vetoed", "old driver"),
    "a veto whose text cannot be formatted": (
        veto(ANY_STR.format("format")),
        "vetoed",
        "old driver",
    ),
    "a veto whose text cannot be compared": (veto(ANY_STR.format("eq")), "vetoed", "old driver"),
    "a veto with an escape": (veto("return 'old \\x1b[2J driver'"), "vetoed", "old"),
    "a veto of a million characters": (veto("return 'x' * 1_000_000"), "vetoed", "xxx"),
    "a veto that is bytes": (
        veto("return b'old driver'"),
        "failed",
        "returned a bytes, expected str or None",
    ),
    "a veto that is a number": (veto("return 3"), "failed", "returned a int, expected str or None"),
    "a veto that is true": (veto("return True"), "failed", "returned a bool, expected str or None"),
    "a veto that is a generator": (
        veto("yield 'old'"),
        "failed",
        "returned a generator, expected str or None",
    ),
    "a veto that raises nothing known": (
        veto(HOSTILE.format("str")),
        "failed",
        "Bad (its message cannot be printed",
    ),
    "a veto whose error cannot be represented": (veto(HOSTILE.format("repr")), "failed", "Bad: x"),
    "a veto that raises an endless message": (
        veto("raise OSError('x' * 1_000_000)"),
        "failed",
        "OSError: xxx",
    ),
    "a veto that exits": (veto("raise SystemExit(0)"), "failed", "SystemExit: 0"),
    "a veto that closes": (veto("raise GeneratorExit"), "failed", "GeneratorExit"),
    "a veto that raises what is no Exception": (
        veto("raise type('Odd', (BaseException,), {})('odd')"),
        "failed",
        "Odd: odd",
    ),
    "a veto without end": (veto("return opgraft_veto()"), "failed", "RecursionError"),
    "a veto that interrupts itself": (
        veto("raise KeyboardInterrupt"),
        "failed",
        "its code raised KeyboardInterrupt, which nobody has sent, at ",
    ),
    "a veto that runs out of memory": (veto("raise MemoryError"), "failed", "MemoryError"),
    "a veto that stops": (veto("raise StopIteration"), "failed", "StopIteration"),
    "a veto with many errors": (
        veto("raise ExceptionGroup('many', [OSError('no driver')])"),
        "failed",
        "many",
    ),
    "a veto caused by itself": (
        veto("error = OSError('loop'); raise error from error"),
        "failed",
        "OSError: loop",
    ),
}

CONFIG_ROWS = {
    "a config that is a dict": (
        hook("opgraft_config", "return {}"),
        "failed",
        "returned a dict, expected OpgraftConfig",
    ),
    "a config that is a class": (
        hook("opgraft_config", "return opgraft.OpgraftConfig"),
        "failed",
        "returned a type",
    ),
    "a config that chooses the platform": (
        hook("opgraft_config", "return opgraft.OpgraftConfig(platform='cpu')"),
        "failed",
        "it sets platform, which was decided before",
    ),
    "a config that is strict": (
        hook("opgraft_config", "return opgraft.OpgraftConfig(strict=True)"),
        "failed",
        "it sets strict, which was decided before",
    ),
    "a config of a value that is none": (
        hook("opgraft_config", "return opgraft.OpgraftConfig(check_values='perhaps')"),
        "failed",
        "check_values",
    ),
    "a scope of settings left open": (
        veto(
            "scopes.append(opgraft.set_config(opgraft.OpgraftConfig(strict=False)))\n    scopes[0].__enter__()"
        )
        + "scopes = []\n",
        "activated",
        "changed the settings in force from none to 1 scopes in its hook opgraft_veto: it was set back",
    ),
}

ADAPTER_ROWS = {
    "adapters without end": (
        hook("opgraft_graft_adapters", f"return itertools.repeat({ADAPTER})"),
        "failed",
        "more than 10,000",
    ),
    "adapters that are none": (
        hook("opgraft_graft_adapters", "return [None]"),
        "failed",
        "returned a NoneType, expected an opgraft.Adapter",
    ),
    "adapters that are text": (
        hook("opgraft_graft_adapters", "return 'acme'"),
        "failed",
        "returned a str, expected an opgraft.Adapter",
    ),
    "adapters that raise": (
        hook("opgraft_graft_adapters", f"yield {ADAPTER}\n    raise OSError('gone')"),
        "failed",
        "OSError: gone",
    ),
    "adapters that are no list": (
        hook("opgraft_graft_adapters", "return 3"),
        "failed",
        "returned a int, expected",
    ),
}

REGISTER = "SiluAndMul.register_oot(Acme{})"

REGISTRATION_ROWS = {
    f"register_oot(Acme{arguments})": (registers(REGISTER.format(arguments)), status, words)
    for arguments, status, words in (
        (", priority='high'", "failed", "use an integer"),
        (", priority=None", "failed", "use an integer"),
        (", priority=1.5", "failed", "use an integer"),
        (", priority=float('nan')", "failed", "use an integer"),
        (", priority=True", "failed", "use an integer"),
        (", priority=[]", "failed", "use an integer"),
        (", when=3", "failed", "when=3: use opgraft.When(...), or a function of the platform"),
        (
            ", when='cuda'",
            "failed",
            "when='cuda': use opgraft.When(...), or a function of the platform",
        ),
        (
            ", when=True",
            "failed",
            "when=True: use opgraft.When(...), or a function of the platform",
        ),
        (
            ", when=lambda: True",
            "failed",
            "which does not take the platform: give it one parameter",
        ),
    )
} | {
    "a replacement that is no class": (
        registers("SiluAndMul.register_oot(3)"),
        "failed",
        "got 3 as a replacement",
    ),
    "a replacement that is a function": (
        registers("SiluAndMul.register_oot(lambda x: x)"),
        "failed",
        "as a replacement: use a class",
    ),
    "a replacement that is its target": (
        registers("SiluAndMul.register_oot(SiluAndMul)"),
        "failed",
        "SiluAndMul",
    ),
    "a replacement of another op": (
        registers("RMSNorm.register_oot(Acme)"),
        "failed",
        "not a subclass",
    ),
    "a target that nobody registers": (
        registers("opgraft.CustomOp.register_oot('SiluAndMull')(Acme)"),
        "activated",
        "no registered op answers to",
    ),
    "a target that is a number": (
        registers("opgraft.CustomOp.register_oot(3)(Acme)"),
        "failed",
        "got 3 as a replacement",
    ),
    "an op of a name that is taken": (
        registers("opgraft.CustomOp.register('rms_norm')(Acme)"),
        "failed",
        "op name 'rms_norm' is registered twice",
    ),
    "an op without a name": (
        registers("opgraft.CustomOp.register('')(Acme)"),
        "failed",
        "an op is registered by a name such as",
    ),
    "an op whose name is a number": (
        registers("opgraft.CustomOp.register(3)(Acme)"),
        "failed",
        "@CustomOp.register('name'): 3",
    ),
    "an op of others removed": (
        registers("del opgraft.CustomOp.op_registry['rms_norm']"),
        "failed",
        "does not support item deletion",
    ),
    "all ops removed": (
        registers("opgraft.CustomOp.op_registry.clear()"),
        "failed",
        "has no attribute 'clear'",
    ),
    "a reset of the host": (
        registers("opgraft.reset()"),
        "failed",
        "called opgraft.reset() while it was loaded",
    ),
    "plugins loaded by a plugin": (registers("opgraft.load_plugins()"), "activated", ""),
    "an op constructed by a plugin": (registers("SiluAndMul()"), "activated", ""),
}

STATED_ROWS = {
    f"platforms = {text}": (stated(text), status, words)
    for text, status, words in (
        ("[]", "failed", "must state where its kernels apply"),
        ("''", "failed", "must state where its kernels apply"),
        ("'cpu'", "failed", "must state where its kernels apply"),
        ("[3]", "failed", "must state where its kernels apply"),
        ("{'cpu'}", "failed", "must state where its kernels apply"),
        ("b'any'", "failed", "must state where its kernels apply"),
        ("'Any'", "failed", "must state where its kernels apply"),
        ("None", "failed", "must state where its kernels apply"),
        ("['cpuu']", "rejected", "applies on cpuu only, this process runs on cpu"),
        ("type('Odd', (), {'__eq__': lambda *_: 1 / 0})()", "failed", "ZeroDivisionError"),
        (
            "type('Odd', (), {'__repr__': lambda *_: 1 / 0})()",
            "failed",
            "must state where its kernels apply",
        ),
    )
}

CONTRACT_ROWS = {
    f"contracts = {text}": (f"{HEAD}contracts = {text}\n", "failed", words)
    for text, words in (
        (
            "{'sampler': 2}",
            "written for contract 2 of 'sampler', and this opgraft has contract 1: ",
        ),
        ("{'samplers': 1}", "the part 'samplers', which this opgraft does not have: "),
        ("{'kernel': '1'}", "contracts must name parts"),
        ("{'kernel': True}", "contracts must name parts"),
        ("['kernel']", "contracts must name parts"),
        ("type('Odd', (), {'__repr__': lambda *_: 1 / 0})()", "contracts must name parts"),
    )
}

MODULE_ROWS = {
    "a module whose every name raises": (
        veto("pass") + "def __dir__(): raise OSError('no names')\n",
        "failed",
        "OSError: no names",
    ),
    "a hook that is misspelt": (
        veto("pass").replace("def opgraft_veto", "def opgraft_vetto"),
        "failed",
        "did you mean 'opgraft_veto'",
    ),
    "a hook that is a class": (
        f"{HEAD}@opgraft.hookimpl\nclass opgraft_veto: pass\n",
        "failed",
        "implements no hook",
    ),
    "a hook that takes what there is none of": (
        f"{HEAD}@opgraft.hookimpl\ndef opgraft_veto(device): pass\n",
        "failed",
        "Argument(s) {'device'} are declared in the hookimpl",
    ),
    "a hook around others": (
        f"{HEAD}@opgraft.hookimpl(hookwrapper=True)\ndef opgraft_veto():\n    yield\n",
        "failed",
        "opgraft_veto returned a generator, expected str or None",
    ),
    "nothing at all": ("", "failed", "must state where its kernels apply"),
    "no hook": ("platforms = 'any'\n", "failed", "implements no hook and registers no op"),
    "a NUL in the source": ("\0", "failed", "null bytes"),
    "source of another encoding": ("# -*- coding: klingon -*-\n", "failed", "klingon"),
    "an import that interrupts itself": (
        "raise KeyboardInterrupt\n",
        "failed",
        "its code raised KeyboardInterrupt, which nobody has sent, at ",
    ),
    "a circle of imports": (
        "import acme\nfrom acme import later\nlater = 1\n",
        "failed",
        "ImportError",
    ),
    "an import of itself in a thread": (
        veto("pass")
        + "import threading\nt = threading.Thread(target=lambda: None)\nt.start()\nt.join()\n",
        "activated",
        "",
    ),
    "a warning when it is imported": (
        veto("pass") + "import warnings\nwarnings.warn('acme is old', DeprecationWarning)\n",
        "failed",
        "acme is old",
    ),
}

ROWS = {
    **VETO_ROWS,
    **CONFIG_ROWS,
    **ADAPTER_ROWS,
    **REGISTRATION_ROWS,
    **STATED_ROWS,
    **CONTRACT_ROWS,
    **MODULE_ROWS,
}
"""By name: the source of the plugin acme, what becomes of it, and words of its reason or its findings."""
