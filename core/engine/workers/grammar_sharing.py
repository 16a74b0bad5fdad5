"""``GrammarSharing``: the grammars that workers in other processes have compiled."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable

from opgraft.engine.sampling import Grammar
from opgraft.machine.channel import encoded


class GrammarSharing:
    """The grammars that workers have compiled. Any thread may use this object.

    Attributes:
        shared: grammars that all workers have compiled. Steps name a grammar by its ``id``.
        forgotten: names of grammars that this process has dropped.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.shared: weakref.WeakSet[Grammar] = weakref.WeakSet()
        self.forgotten: deque[int] = deque()
        self._has_tokens = False

    def share(self, grammar: Grammar, ask: Callable[[memoryview], None]) -> None:
        """Let the workers compile a grammar, unless they have compiled it.

        Args:
            grammar: the grammar of a later step.
            ask: sends a message to the workers, and raises the error of a worker.

        Raises:
            InputError: a worker cannot compile the grammar.
        """
        # Without the lock, as a step must not wait for the grammar of another request.
        if grammar in self.shared:
            return
        with self._lock:
            if grammar in self.shared:
                return
            forgotten = [self.forgotten.popleft() for _ in range(len(self.forgotten))]
            # All grammars of an engine have the same tokens.
            tokens = None if self._has_tokens else grammar.tokens.made_of
            ask(encoded((id(grammar), grammar.spec, tokens, forgotten)))
            self._has_tokens = True
            self.shared.add(grammar)
            weakref.finalize(grammar, self.forgotten.append, id(grammar)).atexit = False
