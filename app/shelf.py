"""What can be found by a secret id: finished runs and opened files. Bounded by bytes and by age; a trace is parsed once."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cachetools import LRUCache

from app.limits import Limits

if TYPE_CHECKING:
    from river_core.trace import Trace

OBJECTS_PER_BYTE = 10
"""Memory of a parsed trace over the length of its JSON: four to eight for a run, up to fifteen for a file made to be worse."""


@dataclass
class _Kept:
    thing: Any
    size: int
    session: str
    address: str
    since: float = field(default_factory=time.monotonic)


class Shelf:
    """Things by id, the least recently used ones dropped first. One visitor cannot take the place of all others: each session and each address has a share,
    and drops its own things when it is over it. Thread-safe."""

    def __init__(self, limits: Limits):
        self._limits = limits
        self._lock = threading.Lock()
        self._things: OrderedDict[str, _Kept] = OrderedDict()
        self._traces: LRUCache[str, tuple[Trace, int]] = LRUCache(limits.parsed, getsizeof=lambda entry: entry[1])
        self._parsing = threading.Lock()

    def put(self, thing_id: str, thing: Any, size: int, session: str = "", address: str = "") -> None:
        """Keep a thing from now on, `size` bytes of it; what is too much for its owner's share, for all together, or too old goes."""
        limits = self._limits
        with self._lock:
            self._things[thing_id] = _Kept(thing, size, session, address)
            self._drop_old()
            self._shrink(limits.kept_each, lambda kept: session and kept.session == session, thing_id)
            self._shrink(limits.kept_address, lambda kept: address and kept.address == address, thing_id)
            self._shrink(limits.kept, lambda kept: True, thing_id)

    def get(self, thing_id: str) -> Any:
        """The thing with this id; None if there is none, or none any more."""
        with self._lock:
            self._drop_old()
            kept = self._things.get(thing_id)
            if kept is None:
                return None
            self._things.move_to_end(thing_id)
            return kept.thing

    def drop_old(self) -> None:
        with self._lock:
            self._drop_old()

    def parsed(self, thing_id: str, size: int, parse: Callable[[], Trace | None]) -> Trace | None:
        """The trace behind an id, parsed if it is not at hand: one at a time, whoever asks. `size` is that of its JSON. It is shared: nobody may change it."""
        with self._parsing:
            with self._lock:
                found = self._traces.get(thing_id)
            if found is not None:
                return found[0]
            trace = parse()
            if trace is not None:
                self.hold(thing_id, size, trace)
            return trace

    def hold(self, thing_id: str, size: int, trace: Trace) -> None:
        """Have a trace at hand that was parsed elsewhere; one that is larger than the whole cache is parsed again each time."""
        cost = size * OBJECTS_PER_BYTE
        if cost <= self._traces.maxsize:
            with self._lock:
                self._traces[thing_id] = (trace, cost)

    @property
    def size(self) -> int:
        """Bytes that are kept."""
        with self._lock:
            return sum(kept.size for kept in self._things.values())

    def _drop_old(self) -> None:
        oldest = time.monotonic() - self._limits.seconds_kept
        for thing_id in [one for one, kept in self._things.items() if kept.since < oldest]:
            self._drop(thing_id)

    def _shrink(self, most: int, of: Callable[[_Kept], Any], newest: str) -> None:
        own = [(one, kept.size) for one, kept in self._things.items() if of(kept)]
        total = sum(size for _, size in own)
        for thing_id, size in own:
            if total <= most or thing_id == newest:
                return
            self._drop(thing_id)
            total -= size

    def _drop(self, thing_id: str) -> None:
        del self._things[thing_id]
        self._traces.pop(thing_id, None)
