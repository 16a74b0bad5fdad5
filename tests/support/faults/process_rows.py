"""Rows of changes that a plugin makes to the process that it shares with others, and what is said of each."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from opgraft.plugins.changes import thorough

IMPORTS = """
import builtins, gc, importlib.metadata, importlib_metadata, io, locale, logging.config, multiprocessing, os
import random, resource, signal, sys, threading, torch, types, warnings
import opgraft
from opgraft.ops import RMSNorm, SiluAndMul
from opgraft.platforms.cpu.platform import CpuPlatform
"""

PLUGIN = "\nplatforms = 'any'\nimport opgraft\n@opgraft.hookimpl\ndef opgraft_veto(): {}\n"

AT_EVERY_LOAD = {
    "torch.set_default_dtype(torch.float64)": "the default dtype from torch.float32 to torch.float64",
    "torch.set_default_device('meta')": "the default device from cpu to meta",
    "torch.set_num_threads(torch.get_num_threads() + 1)": "the number of threads from ",
    "torch.set_grad_enabled(False)": "whether gradients are recorded from True to False",
    "torch.set_autocast_enabled('cpu', True)": "automatic dtypes from no device to cpu",
    "torch.use_deterministic_algorithms(True)": "whether algorithms are deterministic from (False, False) to (True,",
    "torch.set_float32_matmul_precision('medium')": "the precision of float32 from the usual one to ",
    "torch.overrides.BaseTorchFunctionMode().__enter__()": "the modes of torch from none to BaseTorchFunction",
    "sys.setrecursionlimit(9999)": "the recursion limit from ",
    "os.chdir('/')": "the working folder from ",
    "os.umask(0o123)": "the mask of new files from ",
    "files = resource.RLIMIT_NOFILE; low, high = resource.getrlimit(files); "
    "resource.setrlimit(files, (low - 1, high))": ("the limit RLIMIT_NOFILE from "),
    "signal.setitimer(signal.ITIMER_VIRTUAL, 3600)": "the timer ITIMER_VIRTUAL from False to True",
    "os.close(1)": "the file behind sys.stdout while",
    "os.dup2(os.open(os.devnull, os.O_RDWR), 2)": "the file behind sys.stderr while",
    "os.close(0); os.open('/dev/zero', os.O_RDONLY)": "the file behind sys.stdin while",
    "sys.stdout = io.StringIO()": "sys.stdout from ",
    "sys.stdin = None": "sys.stdin from ",
    "sys.stderr = io.StringIO()": "sys.stderr from ",
    "os.environ['TAKEN'] = 'changed'": "the environment variable TAKEN while",
    "del os.environ['TAKEN']": "the environment variable TAKEN while",
    "sys.modules['json'] = sys": "the module json while",
    "del sys.modules['json']": "the module json while",
    "sys.path.reverse()": "the order of sys.path while",
    "sys.path.clear()": "the order of sys.path while",
    "sys.meta_path.insert(0, sys.meta_path[-1])": "the order of sys.meta_path while",
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)": "the handler of SIGTERM while",
    "signal.signal(signal.SIGINT, lambda *_: None)": "the handler of SIGINT while",
    "warnings.simplefilter('ignore')": "the filters of warnings while",
    "warnings.resetwarnings()": "the filters of warnings while",
    "logging.disable(50)": "the level of logging.disable from NOTSET to CRITICAL while",
    "logging.getLogger().setLevel(50)": "the root logger: level from WARNING to CRITICAL while",
    "logging.getLogger().addHandler(logging.StreamHandler())": "the root logger: handlers from ",
    "logging.getLogger().addFilter(logging.Filter('x'))": "the root logger: filters from none to Filter while",
    "logging.getLogger('opgraft').disabled = True": "the logger opgraft: disabled from False to True while",
    "logging.getLogger('opgraft').propagate = False": "the logger opgraft: propagate from True to False",
    "logging.getLogger('opgraft').addFilter(lambda _: 0)": "the logger opgraft: filters from none to function",
    # Ray, which other tests of the process may have imported, has a factory of its own.
    "logging.setLogRecordFactory(dict)": "the factory of log records from ",
    "logging.setLoggerClass(type('Mute', (logging.Logger,), {}))": "the class of loggers from Logger to Mute while",
    "torch.manual_seed(torch.initial_seed() + 1)": "torch's random numbers from ",
    "random.seed(str(random.getstate()))": "Python's random numbers from ",
    "torch.backends.mkldnn.enabled = False": "torch.backends.mkldnn.enabled from True to False",
    "logging.config.dictConfig({'version': 1, 'loggers': {'opgraft': {}, 'acme': {}}})": (
        "the switches of other loggers while"
    ),
    "torch.nn.functional.silu = torch.relu": "torch.nn.functional.silu while",
    "torch.set_default_dtype = lambda dtype: None": "torch.set_default_dtype while",
    "torch.distributed.all_reduce = print": "torch.distributed.all_reduce while",
    # Of opgraft, and held by the module of the plugin.
    "from opgraft.binding.derivation import NATIVE; NATIVE.rms_norm = abs": (
        "opgraft's native definitions.rms_norm while"
    ),
    "own = RMSNorm.forward_native; own.__kwdefaults__['functional'] = None": (
        "opgraft.ops.layernorm.modules.RMSNorm.forward_native.__kwdefaults__ while"
    ),
    "own = RMSNorm.forward_native; own.__code__ = (lambda *_: None).__code__": (
        "opgraft.ops.layernorm.modules.RMSNorm.forward_native.__code__ while"
    ),
    "del torch.nn.functional.gelu": "torch.nn.functional, taking gelu away while",
    "torch.Tensor.__matmul__ = torch.Tensor.__mul__": "torch's Tensor.__matmul__ (new) while",
    "torch.nn.Module.__call__ = lambda *_: None": "torch's Module.__call__ while",
    "torch.nn.Module.__call__ = torch.no_grad()(lambda *_: None)": "torch's Module.__call__ while",
    "torch.nn.functional.max_pool2d = torch.nn.functional.relu": "torch.nn.functional.max_pool2d while",
    "RMSNorm.forward_native = lambda *_: None": "opgraft's RMSNorm.forward_native while",
    "RMSNorm.forward_oot = lambda *_: None": "opgraft's RMSNorm.forward_oot (new) while",
    "RMSNorm.functional_cpu = {}": "opgraft's RMSNorm.functional_cpu (new) while",
    "del RMSNorm.forward_native": "opgraft's RMSNorm, taking forward_native away while",
    "opgraft.CustomOp.enabled = classmethod(lambda cls: False)": "opgraft's CustomOp.enabled while",
    "CpuPlatform.memory = lambda *_: None": "opgraft's CpuPlatform.memory while",
    "opgraft.ops.RMSNorm = None": "opgraft.ops.RMSNorm while",
    "torch.nn.LayerNorm.forward = lambda self, x: x": "torch's LayerNorm.forward while",
    "opgraft.Platform.default_config = None": "opgraft's Platform.default_config while",
    "importlib.metadata.version = lambda name: '0'": "importlib.metadata.version while",
    "importlib.metadata.entry_points = None": "importlib.metadata.entry_points while",
    "importlib.metadata.Distribution.from_name = None": "importlib's Distribution.from_name while",
    "importlib_metadata.EntryPoint.load = lambda self: None": "importlib_metadata's EntryPoint.load while",
    "del importlib.metadata.distribution": "importlib.metadata, taking distribution away while",
    "vars(importlib.metadata).clear()": "importlib.metadata, taking __name__, __doc__, __package__ and ",
    "sys.modules['acme_of_nobody'] = None": "the module acme_of_nobody to nothing while",
    "sys.meta_path.append(type('Finder', (), {'find_spec': lambda *_: 1 / 0})())": (
        "sys.meta_path <acme"
    ),
    "sys.meta_path.append(42)": "sys.meta_path 42, which raises AttributeError",
    "sys.meta_path.append(type('Finder', (), {'find_spec': lambda *_: 7})())": (
        "sys.meta_path <acme"
    ),
    "sys.meta_path = None": "the list sys.meta_path while",
    "sys.path = None": "the list sys.path while",
    "sys.path_hooks.append(42)": "sys.path_hooks 42, which raises TypeError",
    "sys.path_hooks.append(lambda path: 1 / 0)": "sys.path_hooks <function",
    "sys.path_hooks.append(lambda path: 42)": "sys.path_hooks <function",
    "sys.path_importer_cache['/acme'] = 42": "the finder for /acme, int while",
    "builtins.ascii = lambda x: x": "builtins ascii while",
    "torch.nn.modules.module.register_module_forward_hook(lambda *_: None)": (
        "the hooks that torch calls for every module from 0 to 1 while"
    ),
    "torch.nn.modules.module.register_module_parameter_registration_hook(lambda *_: None)": (
        "the hooks that torch calls for every module from 0 to 1 while"
    ),
    "torch.nn.modules.module.register_module_module_registration_hook(lambda *_: None)": (
        "the hooks that torch calls for every module from 0 to 1 while"
    ),
    "torch.set_flush_denormal(True)": "whether tiny numbers become zero from False to True while",
    "torch._C._nn.silu = torch.relu": "torch._C._nn.silu while",
    "t = opgraft.registry.state.host_state().registry.ops; t['gelu'] = t['silu']": (
        "the op registered as gelu while"
    ),
    "t = opgraft.registry.state.host_state().registry.forms; t['gelu_new'] = t['rms_norm']": (
        "the functional form gelu_new while"
    ),
    "torch.nn.functional.__class__ = type('Other', (types.ModuleType,), {})": (
        "torch.nn.functional.__class__ while"
    ),
    "opgraft.functional.__class__ = type('Other', (types.ModuleType,), {})": (
        "opgraft.functional.__class__ while"
    ),
    "form = opgraft.functional.rms_norm; form.__class__ = type('Other', (type(form),), {})": (
        "opgraft's rms_norm.__class__ while"
    ),
    "RMSNorm.__bases__ = (type('Other', RMSNorm.__bases__, {}),)": "opgraft's RMSNorm.__bases__ while",
    "torch.nn.Linear.__bases__ = (type('Other', torch.nn.Linear.__bases__, {}),)": (
        "torch's Linear.__bases__ while"
    ),
    "globals()['own'] = torch.library.Library('aten', 'IMPL'); own.impl('special_i0e', abs, 'CPU')": (
        "the kernel of torch's operator special_i0e for CPU while"
    ),
}
"""Source of a plugin, and what each load of plugins says of it; each is set back."""

if hasattr(torch.backends, "fp32_precision"):  # from torch 2.9 on
    AT_EVERY_LOAD |= {
        "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'": (
            "the precision of float32 from the usual one to bf16 of mkldnn.matmul while"
        ),
        "torch.backends.mkldnn.conv.fp32_precision = 'bf16'": (
            "the precision of float32 from the usual one to bf16 of mkldnn.conv while"
        ),
        "torch.backends.cudnn.conv.fp32_precision = 'ieee'": (
            "the precision of float32 from the usual one to ieee of cudnn.conv while"
        ),
        "torch.backends.fp32_precision = 'tf32'": "the precision of float32 from the usual one to tf32 of all, ",
    }

BROKEN = "type('Broken', (), {'find_spec': lambda *_: 1 / 0})()"
REBOUND = {
    f"sys.meta_path = [{BROKEN}, *sys.meta_path]": (
        "the list sys.meta_path",
        "sys.meta_path <acme.Broken",
    ),
    "sys.path = ['/acme', *sys.path]": ("the list sys.path", "sys.path /acme (new)"),
    "sys.path_hooks = [42, *sys.path_hooks]": ("the list sys.path_hooks", "sys.path_hooks 42"),
}
"""Source of a plugin that puts another list in a place, and what is said of the list and of its new item."""

THOROUGH = {
    "torch.autograd.set_detect_anomaly(True)": "the detection of anomalies from False to True",
    "locale.setlocale(locale.LC_NUMERIC, 'C.UTF-8')": "the locale from ",
    "warnings.showwarning = print": "warnings.showwarning from ",
    "sys.excepthook = print": "sys.excepthook from ",
    "threading.excepthook = print": "threading.excepthook while",
    "gc.set_threshold(7)": "the thresholds of the garbage collector from ",
    "multiprocessing.set_start_method('spawn', force=True)": "the start method of processes from ",
    "torch.backends.cuda.enable_math_sdp(False)": "whether attention may be computed by math from True to False while",
    "sys.settrace(lambda *_: None)": "what traces the functions of this thread from None to ",
    "threading.setprofile(lambda *_: None)": "what profiles the functions of new threads from None to ",
    "sys.unraisablehook = print": "sys.unraisablehook from ",
    "gc.disable()": "whether garbage is collected from True to False while",
    "sys.setswitchinterval(1)": "the time after which threads take turns from ",
    "os.path.exists = lambda path: False": "posixpath.exists while",
}
"""Source of a plugin, and what the doctor and the conformance kit say of it; each is set back."""

SET_BACK = {**AT_EVERY_LOAD, **THOROUGH}


def comparing(change: str) -> AbstractContextManager[None]:
    """Compare as much as it takes to see a row of ``SET_BACK`` or ``OF_BRIX``."""
    return nullcontext() if change in AT_EVERY_LOAD else thorough()


OF_BRIX: dict[str, tuple[str, ...]] = {
    "sys.modules['brix'] = None": ("the module brix",),
    "sys.modules['brix'] = types.ModuleType('brix')": ("the module brix",),
    "import brix; vars(brix).clear()": ("the module brix to a module", "brix, taking __name__"),
    "import brix; del brix.opgraft_register_ops": ("brix, taking opgraft_register_ops away",),
    "import brix; brix.opgraft_register_ops = id": ("brix.opgraft_register_ops",),
    "import brix; brix.BrixRMSNorm = None": ("brix.BrixRMSNorm",),
    "import brix, functools; "
    "brix.opgraft_register_ops = functools.wraps(brix.opgraft_register_ops)(lambda: 0)": (
        "brix.opgraft_register_ops",
    ),
    "import brix; brix.BrixRMSNorm.forward_oot = id": ("brix's BrixRMSNorm.forward_oot",),
    "import brix; del brix.BrixRMSNorm.forward_oot": (
        "brix's BrixRMSNorm, taking forward_oot away",
    ),
}
"""Source of a plugin that harms the plugin brix, and the ways in which it is told."""
