"""``SuffixAutomaton``: finds the last tokens of a text, as many as possible, in other texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from opgraft.engine.drafting.guess import NO_GUESS, Guess

_ROOT = 0
_NONE = -1


class SuffixAutomaton:
    """The smallest automaton for all parts of some texts.

    A state stands for parts of texts that occur at the same places. A token adds two states at
    most, in constant time on average (Blumer et al., "The smallest automaton recognizing the
    subwords of a text", 1985).

    Attributes:
        tokens: of all texts, one behind the other.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        # By state: the states behind each next token; the state of the longest suffix with other
        # places; the length of the longest part; and the place in ``tokens`` behind this part.
        self._next: list[dict[int, int]] = []
        self._link: list[int] = []
        self._length: list[int] = []
        self._place: list[int] = []
        self._new_state(0, {}, _NONE, 0)

    def _new_state(self, length: int, following: dict[int, int], link: int, place: int) -> int:
        self._next.append(following)
        self._link.append(link)
        self._length.append(length)
        self._place.append(place)
        return len(self._next) - 1

    def add(self, text: Iterable[int]) -> None:
        """Remember one more text."""
        state = _ROOT
        for token in text:
            self.tokens.append(token)
            state = self._extend(state, token)

    def _extend(self, state: int, token: int) -> int:
        """Return the state of the text of ``state`` with one more token."""
        if token in self._next[state]:
            known = self._exact(state, token)
            self._renew_place(known)
            return known
        # Shorter suffixes go on to the new state too, up to the first with this token behind it.
        new = self._new_state(self._length[state] + 1, {}, _ROOT, len(self.tokens))
        while state != _NONE and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        if state != _NONE:
            self._link[new] = self._exact(state, token)
        self._renew_place(new)
        return new

    def _renew_place(self, state: int) -> None:
        """Note the latest place, the best guess of what follows, for a state and its link.

        The links behind keep earlier places, because there may be many of them.
        """
        place = len(self.tokens)
        self._place[state] = place
        self._place[self._link[state]] = place

    def _exact(self, state: int, token: int) -> int:
        """Return the state behind ``token`` with parts up to one token longer than before.

        A state with longer parts is split: the longer ones have fewer places from now on.
        """
        found = self._next[state][token]
        length = self._length[state] + 1
        if self._length[found] == length:
            return found
        following = dict(self._next[found])
        split = self._new_state(length, following, self._link[found], self._place[found])
        self._link[found] = split
        while state != _NONE and self._next[state].get(token) == found:
            self._next[state][token] = split
            state = self._link[state]
        return split

    def guess(self, last: Sequence[int], most: int) -> Guess:
        """Return the continuation of the longest part with the same end as ``last``."""
        state = _ROOT
        matched = 0
        for token in last:
            # Drop tokens from the front until the rest has this token behind it.
            while state != _ROOT and token not in self._next[state]:
                state = self._link[state]
                matched = self._length[state]
            if token in self._next[state]:
                state = self._next[state][token]
                matched += 1
        if state == _ROOT:
            return NO_GUESS
        place = self._place[state]
        return Guess(matched, self.tokens[place : place + most])
