"""``GrammarSharing``: what the workers in other processes know of grammars."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable

from opgraft.engine.sampling import Grammar
from opgraft.machine.channel import encoded


class GrammarSharing:
    """The grammars that workers have compiled, which steps name. It is asked from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.shared: weakref.WeakSet[Grammar] = weakref.WeakSet()
        self.forgotten: deque[int] = deque()
        self._has_tokens = False

    def share(self, grammar: Grammar, ask: Callable[[memoryview], None]) -> None:
        """Have the workers compile a grammar, unless they have.

        Args:
            grammar: that a step is to name.
            ask: sends a message to the workers, and raises what one of them raises.

        Raises:
            InputError: it cannot be compiled there.
        """
        # Asked without the lock, as a step must not wait for a grammar of others.
        if grammar in self.shared:
            return
        with self._lock:
            if grammar in self.shared:
                return
            forgotten = [self.forgotten.popleft() for _ in range(len(self.forgotten))]
            tokens = None if self._has_tokens else grammar.tokens.made_of
            ask(encoded((id(grammar), grammar.spec, tokens, forgotten)))
            self._has_tokens = True
            self.shared.add(grammar)
            weakref.finalize(grammar, self.forgotten.append, id(grammar)).atexit = False
