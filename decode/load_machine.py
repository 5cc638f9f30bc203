"""State machine of loading one prompt's KV on the decode instance. Sans-IO: events go in, actions come out.

    WAITING ── reserved ──► LOADING ── quiet, and all here or no more to come ──► STARTED
                             │  ▲ │                                                 ▲
                      missed │  │ └── failed ──► BROKEN ── quiet, and no more ──────┘
                             ▼  │ quiet            ▲       to come
                           REPEATING ── failed ────┘          ended, in any state ──► ENDED

LOADING loads every block that is available, as soon as it is and there is room for it in the pool; a connector that can
also follows blocks that prefill is still storing. In REPEATING, a following load has missed blocks that were not stored in
time: they are loaded again once no transfer is under way that may still write to their rows. In BROKEN, a block could not be
loaded, so later ones are of no use. "Quiet" means that no load is under way; "no more to come" is prefill's final report.

All numbers of blocks count leading blocks of the prompt, those outside of every later token's attention window included.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """States of a load."""

    WAITING = "waiting"  # it has no blocks in the pool yet
    LOADING = "loading"
    REPEATING = "repeating"
    BROKEN = "broken"
    STARTED = "started"  # the sequence has joined the engine
    ENDED = "ended"


class Event(StrEnum):
    """Inputs of the machine."""

    SKIPPED = "skipped"  # there is no hand-over: this instance computes the prompt
    RESERVED = "reserved"  # the sequence has blocks in the pool
    GROWN = "grown"  # it has further ones
    REPORTED = "reported"  # prefill's progress: blocks, the first token, or that no more will come
    LOADED = "loaded"  # a load has ended with all its blocks
    MISSED = "missed"  # a following load has ended without a block that was not stored in time
    FAILED = "failed"  # a load has ended without a block
    QUIET = "quiet"  # no load is under way
    READY = "ready"  # quiet, and nothing is missing or no more will come
    ENDED = "ended"  # the request has finished or was cancelled


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.WAITING, Event.SKIPPED): State.STARTED,
    (State.WAITING, Event.RESERVED): State.LOADING,
    (State.WAITING, Event.REPORTED): State.WAITING,
    (State.LOADING, Event.REPORTED): State.LOADING,
    (State.LOADING, Event.GROWN): State.LOADING,
    (State.LOADING, Event.LOADED): State.LOADING,
    (State.LOADING, Event.MISSED): State.REPEATING,
    (State.LOADING, Event.FAILED): State.BROKEN,
    (State.LOADING, Event.READY): State.STARTED,
    (State.REPEATING, Event.REPORTED): State.REPEATING,
    (State.REPEATING, Event.GROWN): State.REPEATING,
    (State.REPEATING, Event.LOADED): State.REPEATING,
    (State.REPEATING, Event.MISSED): State.REPEATING,
    (State.REPEATING, Event.FAILED): State.BROKEN,
    (State.REPEATING, Event.QUIET): State.LOADING,
    (State.BROKEN, Event.REPORTED): State.BROKEN,
    (State.BROKEN, Event.LOADED): State.BROKEN,
    (State.BROKEN, Event.MISSED): State.BROKEN,
    (State.BROKEN, Event.FAILED): State.BROKEN,
    (State.BROKEN, Event.READY): State.STARTED,
    (State.STARTED, Event.REPORTED): State.STARTED,
    # Loads of a request that has ended go on until they end too, and prefill's reports may cross with the end.
    (State.ENDED, Event.REPORTED): State.ENDED,
    (State.ENDED, Event.LOADED): State.ENDED,
    (State.ENDED, Event.MISSED): State.ENDED,
    (State.ENDED, Event.FAILED): State.ENDED,
    **{(state, Event.ENDED): State.ENDED for state in State},
}


@dataclass(frozen=True)
class Load:
    """Action: load blocks [first, stop), or follow them while prefill stores them."""

    first: int
    stop: int
    follows: bool = False


@dataclass(frozen=True)
class Start:
    """Action: join the engine with the KV of the first `num_blocks`. The engine computes the rest."""

    num_blocks: int


Action = Load | Start


class LoadMachine:
    """Decides which blocks to load next, and when the sequence joins the engine.

    Args:
        num_blocks: blocks of the prompt, a partial last one included.
        max_blocks: limit of one load.
        split: splits the blocks [first, stop) that are being stored into the parts that are followed.

    Attributes:
        available: blocks that are in the KV store.
        coming: blocks that are in the store or being stored, if they are followed.
        room: leading blocks for which the sequence has room in the pool.
        wanted: those for which it needs room: their KV is in the store, or under way.
        lacks_room: blocks could be loaded for which the sequence has no room.
        is_announced: prefill has reported something.
        is_final: prefill will store no more blocks.
        has_started: the sequence has joined the engine, though it may have ended since.
    """

    def __init__(
        self, num_blocks: int, max_blocks: int, split: Callable[[int, int], Iterable[tuple[int, int]]]
    ) -> None:
        self.state = State.WAITING
        self.available = 0
        self.coming = 0
        self.room = 0
        self.wanted = 0
        self.lacks_room = False
        self.is_announced = False
        self.is_final = False
        self.has_started = False
        self._num_blocks = num_blocks
        self._max_blocks = max_blocks
        self._split = split
        self._has_first_token = False
        self._requested = 0  # blocks that are in the pool, not needed, or for which a load was started
        self._bad_block = num_blocks  # the first block that could not be loaded
        self._under_way = 0  # loads

    def skip(self) -> None:
        """Handle that no prefill instance hands anything over."""
        self._move(Event.SKIPPED)

    def reserved(self, first: int, room: int) -> list[Action]:
        """Handle that the sequence has room for the first `room` blocks. Those before `first` hold their KV already or are
        not needed."""
        self._requested, self.room = first, room
        return self._handle(Event.RESERVED)

    def grown(self, room: int) -> list[Action]:
        """Handle that the sequence has room for more blocks."""
        self.room = room
        return self._handle(Event.GROWN)

    def shared(self, num_blocks: int) -> list[Action]:
        """Handle that the sequence shares the first `num_blocks` of another one of its request, which has loaded them."""
        self._move(Event.RESERVED)
        self._requested = self._bad_block = num_blocks
        if num_blocks < self._num_blocks:
            self._move(Event.FAILED)
        return list(self._next_actions())

    def reported(self, available: int, coming: int, *, is_final: bool, has_first_token: bool) -> list[Action]:
        """Handle prefill's report. Its numbers only grow."""
        self.available = max(self.available, min(available, self._num_blocks))
        if not self.has_started:
            self.coming = max(self.coming, min(coming, self._num_blocks))
        self.is_announced = True
        self.is_final |= is_final
        self._has_first_token |= has_first_token
        return self._handle(Event.REPORTED)

    def loaded(self, load: Load, num_leading: int, *, missed: bool = False) -> list[Action]:
        """Handle the end of a load.

        Args:
            num_leading: leading blocks of the load that were loaded.
            missed: the next block was not stored in time.
        """
        self._under_way -= 1
        end = load.first + num_leading
        if end == load.stop:
            return self._handle(Event.LOADED)
        if missed and load.follows:
            self._requested, self.coming = min(self._requested, end), 0
            return self._handle(Event.MISSED)
        self._bad_block = min(self._bad_block, end)
        return self._handle(Event.FAILED)

    def end(self) -> None:
        """Handle that the request has finished or was cancelled."""
        self._move(Event.ENDED)

    def _handle(self, event: Event) -> list[Action]:
        self._move(event)
        return list(self._next_actions())

    def _move(self, event: Event) -> None:
        transition = self.state, event
        assert transition in TRANSITIONS, f"{event} in state {self.state}"
        self.state = TRANSITIONS[transition]
        self.has_started |= self.state is State.STARTED
        self.wanted = max(self.available, self.coming)
        self.lacks_room = self.state in (State.LOADING, State.REPEATING) and self.wanted > self.room

    def _next_actions(self) -> Iterator[Action]:
        if self.state is State.REPEATING and not self._under_way:
            self._move(Event.QUIET)
        if self.state is State.LOADING:
            for load in self._next_loads():
                self._requested = load.stop
                self._under_way += 1
                yield load
        if self._is_ready():
            self._move(Event.READY)
            # `_requested` is the lower one if prefill stored less, or if a following load missed earlier blocks.
            yield Start(min(self._bad_block, self._requested))

    def _next_loads(self) -> Iterator[Load]:
        available, coming = min(self.available, self.room), min(self.coming, self.room)
        for first in range(self._requested, available, self._max_blocks):
            yield Load(first, min(first + self._max_blocks, available))
        if coming > self._requested:
            for first, stop in self._split(self._requested, coming):
                yield Load(first, stop, follows=True)

    def _is_ready(self) -> bool:
        if self._under_way or self.state not in (State.LOADING, State.BROKEN):
            return False
        if self.state is State.BROKEN:
            return self.is_final
        is_complete = self._requested == self._num_blocks and self._has_first_token
        return is_complete or (self.is_final and self._requested >= self.available)
