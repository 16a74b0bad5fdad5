"""Starting over within a process."""

from __future__ import annotations

import sys

from opgraft.state import renew_state


def reset() -> None:
    """Forget the selected platform, the loaded plugins and every activation; keep what was declared.

    Op classes stay registered. A plugin's replacements apply again when the plugin is activated again; one that was
    registered outside of plugins applies again when it is registered again. Existing ops keep their kernels; compiled
    code is dropped. Scopes of ``set_config`` that are open stay open.
    """
    renew_state()
    if "torch" in sys.modules:
        sys.modules["torch"].compiler.reset()
