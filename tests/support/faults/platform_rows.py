"""Rows of platforms whose properties are wrong, and words of the finding about each."""

from __future__ import annotations

HEAD = "from opgraft.platforms.cpu.platform import CpuPlatform\n"


def stated(name: str, value: str) -> str:
    """A platform class whose property has that value."""
    return f"{HEAD}class Device(CpuPlatform):\n    name = 'acme'\n    {name} = {value}\n"


def computed(name: str, body: str) -> str:
    """A platform class whose property is computed."""
    return (
        f"{HEAD}class Device(CpuPlatform):\n    name = 'acme'\n    reads = 0\n"
        f"    @property\n    def {name}(self):\n        {body}\n"
    )


VALUES = {
    ("device_type", "None"): "its device_type is None, expected a string that is not empty",
    ("device_type", "3"): "its device_type is a int, expected a string",
    ("device_type", "''"): "its device_type is a str, expected a string that is not empty",
    ("device_type", "'meta'"): "its device_type is 'meta', whose tensors hold no numbers",
    ("device_type", "'cpu:0'"): "its device_type is 'cpu:0', which names one device: use 'cpu'",
    ("dispatch_chain", "None"): "its dispatch_chain is None, expected a tuple of strings",
    ("dispatch_chain", "'cpu'"): "its dispatch_chain is a str, expected a tuple of strings",
    ("dispatch_chain", "3"): "its dispatch_chain is a int, expected a tuple of strings",
    ("dispatch_chain", "(None,)"): "its entry of dispatch_chain is None, expected a string",
    ("dispatch_chain", "([],)"): "its entry of dispatch_chain is a list, expected a string",
    ("dispatch_chain", "('npu',)"): "declares the dispatch chain ('npu',)",
    ("kernel_packages", "None"): "its kernel_packages is None, expected a mapping",
    ("kernel_packages", "['acme']"): "its kernel_packages is a list, expected a mapping",
    ("kernel_packages", "{'acme': None}"): "its kernel_packages['acme'] is None, expected a tuple",
    ("kernel_packages", "{3: ()}"): "its key of kernel_packages is a int, expected a string",
    ("distributed_backend", "None"): "its distributed_backend is None, expected a string",
    ("compile_backend", "None"): "its compile_backend is None, expected a string",
    ("visibility_variable", "3"): "its visibility_variable is a int, expected a string",
    ("ray_device_key", "('GPU',)"): "its ray_device_key is a tuple, expected a string",
    ("graph_class", "'Graph'"): "its graph_class is a str, expected a class or None",
    ("name", "None"): "its name is None, expected a string",
}

RAISES = {
    ("device_type", "raise OSError('no driver')"): "device_type raised OSError: no driver",
    ("dispatch_chain", "return self.chain"): "dispatch_chain raised AttributeError",
    ("kernel_packages", "raise SystemExit(3)"): "kernel_packages raised SystemExit: 3",
    ("kernel_packages", "raise KeyboardInterrupt"): "KeyboardInterrupt",
    ("streams", "raise ImportError('no streams')"): "streams raised ImportError: no streams",
    ("name", "raise OSError('no name')"): "its property name raised OSError: no name",
}

REFUSED = {
    **{
        f"{name} = {value}": (stated(name, value), words) for (name, value), words in VALUES.items()
    },
    **{f"{name}: {body}": (computed(name, body), words) for (name, body), words in RAISES.items()},
}
"""By name: the source of a platform, and words of the finding; the next platform is chosen."""

AFTER = "self.reads += 1\n        {} if self.reads > 1 else None\n        return {}"
"""The body of a property that does something when it is read again, and returns a value."""

LATER = {
    (name, do): computed(name, AFTER.format(do, value))
    for name, value in (
        ("device_type", "'cpu'"),
        ("dispatch_chain", "('cpu',)"),
        ("kernel_packages", "{'acme-kernels': ('rms_norm',)}"),
        ("compile_backend", "'inductor'"),
        ("visibility_variable", "None"),
    )
    for do in ("1 / 0", "exit(3)")
} | {
    ("dispatch_chain", "a list that grows"): computed(
        "dispatch_chain",
        "vars(self).setdefault('chain', []).append('cpu')\n        return self.chain",
    ),
    ("device_type", "None when it is read again"): computed(
        "device_type", "self.reads += 1\n        return 'cpu' if self.reads == 1 else None"
    ),
}
"""Sources of platforms whose property is right when it is read first, and wrong when it is read again."""


def method(signature: str, body: str, head: str = "def") -> str:
    """A platform class with a method of its own, which stands in line 4."""
    return (
        f"{HEAD}class Device(CpuPlatform):\n    name = 'acme'\n    {head} {signature}:\n"
        f"        {body}\n"
    )


ONE = "(self, index=0)"
CAPABILITY = "import torch; from opgraft import DeviceCapability as Is; return Is({})"
MEMORY = "from opgraft import DeviceMemory; return DeviceMemory({})"
METHODS = {
    ("device_count", "(self)", "raise OSError('gone')"): "raised OSError: gone",
    ("device_count", "(self)", "return '1'"): "it returned '1', expected a number of devices",
    ("device_count", "(self)", "return -1"): "it returned -1, expected a number of devices",
    ("device_count", "(self)", "return 10**12"): "it returned 1000000000000, expected at most 10,0",
    ("capability", ONE, "raise KeyboardInterrupt"): "raised KeyboardInterrupt, which nobody",
    ("capability", ONE, "return None"): "it returned None, expected an opgraft.DeviceCapability",
    ("capability", ONE, CAPABILITY.format("'x', ()")): "expected a tuple of floating-point dtypes",
    ("capability", ONE, CAPABILITY.format("'x', (torch.int8,)")): "floating-point dtypes",
    ("capability", ONE, CAPABILITY.format("'x', (torch.half,), None, 'avx'")): "as features",
    ("memory", ONE, "raise SystemExit(3)"): "raised SystemExit: 3",
    ("memory", ONE, "return None"): "it returned None, expected an opgraft.DeviceMemory",
    ("memory", ONE, MEMORY.format("1.5, 1")): "it returned a float, expected a whole number",
    ("memory", ONE, MEMORY.format("1, 2")): "it tells 2 bytes free of 1",
    ("memory", ONE, MEMORY.format("0, 0")): "it tells 0 bytes in all",
    ("manual_seed", "(self, seed)", "raise OSError('no seed')"): "raised OSError: no seed",
    ("manual_seed", "(self)", "pass"): "raised TypeError: ",
    ("synchronize", ONE, "raise OSError('no queue')"): "raised OSError: no queue",
}
"""By method, its arguments and body: words of the error of a command, and of the doctor's finding."""
NEVER_CALLED = ("synchronize",)
"""The methods that no step calls whose device is the host's."""
