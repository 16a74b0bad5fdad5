"""Python's garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Hold back the collector while many objects are made that stay.

    A collection would look through all of them, for a tenth of a second. After the block, the
    objects count as old.
    """
    # The program may have switched the collector off for good.
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            # This moves all objects to the oldest generation, so that the next collection of young
            # objects leaves them out. Objects that the program has frozen would move, too.
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()
