"""The hand-over of one request, as a state machine without I/O: events go in, actions come out.

                        ┌──────────────────────── prefill lost, failed or late ────────────────────────┐
                        │                                  │                                           ▼
    PREFILLING ── first token ──► TRANSFERRING ── all stored ──► LOADING ── first decoded token ──► DECODING ──► FINISHED
        │  ▲ owner: prefill           owner: prefill               owner: decode                  owner: decode
        ▲  └── the client gone: in any state ──► CANCELLED
        │└──── decode drained: in any state
        └───── decode lost, failed or late: in any state, a few times; then, or if nobody can take over ──► FAILED

The owner of a state is the instance that must act next; when the state's time runs out, the owner is taken to have
failed. A failed prefill costs time only: decode is told that no more KV will come, computes what is missing, and samples
the first token itself if need be, so the tokens are the same. A failed decode costs time as long as another pair of
instances can take over: prompt plus emitted tokens are prefilled again, and the stream goes on where it stopped.

Whatever the exit, every instance that still holds something of the request is told to let go: CANCEL_PREFILL and
CANCEL_DECODE are harmless for one that has finished.
"""

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    PREFILLING = "prefilling"
    TRANSFERRING = "transferring"
    LOADING = "loading"
    DECODING = "decoding"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Event(StrEnum):
    FIRST_TOKEN = "first_token"  # prefill has sampled token 1
    STORED = "stored"  # all KV is in the store, or as much as ever will be
    DECODED = "decoded"  # decode has produced a token
    FINISHED = "finished"  # the instance whose turn it is says that the output is complete
    PREFILL_FAILED = "prefill_failed"
    DECODE_FAILED = "decode_failed"
    LATE = "late"  # no progress within the state's time
    DRAINED = "drained"  # decode is to take nothing more, and others can go on
    UNPLACED = "unplaced"  # nobody can take the request, or it was refused: trying again would not help
    CANCELLED = "cancelled"  # the client has gone, or has what it wanted


class Action(StrEnum):
    FINALIZE = "finalize"  # tell decode that no more KV will be stored
    CANCEL_PREFILL = "cancel_prefill"
    CANCEL_DECODE = "cancel_decode"
    RESUME = "resume"  # choose instances anew, submit prompt plus emitted tokens, and call `resumed`
    FAIL = "fail"  # end the client's stream with an error


OWNER: dict[State, str] = {
    State.PREFILLING: "prefill",
    State.TRANSFERRING: "prefill",
    State.LOADING: "decode",
    State.DECODING: "decode",
}
ENDED = frozenset({State.FINISHED, State.FAILED, State.CANCELLED})

MAX_RESUMPTIONS = 3
_BOTH = (Action.CANCEL_PREFILL, Action.CANCEL_DECODE)
_Rule = tuple[State, tuple[Action, ...]]

# Events that mean the same in every state that has not ended.
_ANYWHERE: dict[Event, _Rule] = {
    Event.FINISHED: (State.FINISHED, _BOTH),
    Event.DECODE_FAILED: (State.PREFILLING, (*_BOTH, Action.RESUME)),
    Event.DRAINED: (State.PREFILLING, (*_BOTH, Action.RESUME)),
    Event.UNPLACED: (State.FAILED, (Action.FAIL, *_BOTH)),
    Event.CANCELLED: (State.CANCELLED, _BOTH),
}
_RULES: dict[tuple[State, Event], _Rule] = {
    (State.PREFILLING, Event.FIRST_TOKEN): (State.TRANSFERRING, ()),
    (State.PREFILLING, Event.PREFILL_FAILED): (State.LOADING, (Action.FINALIZE, Action.CANCEL_PREFILL)),
    (State.TRANSFERRING, Event.STORED): (State.LOADING, ()),
    # Decode had, or loaded early, all that it lacked.
    (State.TRANSFERRING, Event.DECODED): (State.DECODING, ()),
    (State.TRANSFERRING, Event.PREFILL_FAILED): (State.LOADING, (Action.FINALIZE, Action.CANCEL_PREFILL)),
    (State.LOADING, Event.DECODED): (State.DECODING, ()),
    # Prefill has nothing left to fail at, or its news was under way when it was given up.
    (State.LOADING, Event.FIRST_TOKEN): (State.LOADING, ()),
    (State.LOADING, Event.STORED): (State.LOADING, ()),
    (State.LOADING, Event.PREFILL_FAILED): (State.LOADING, ()),
    (State.DECODING, Event.FIRST_TOKEN): (State.DECODING, ()),
    (State.DECODING, Event.STORED): (State.DECODING, ()),
    (State.DECODING, Event.PREFILL_FAILED): (State.DECODING, ()),
    (State.DECODING, Event.DECODED): (State.DECODING, ()),
}


class IllegalTransition(AssertionError):
    """An instance said something that cannot be true in this state: a defect of ours, not of the client."""


@dataclass
class HandOver:
    """Where one request stands. `state_timeout_s` bounds the time without progress in each state that has an owner.

    Attributes:
        split: prefill and decode are different instances. Else the one instance owns everything, and its failure is
            a decode failure.
        since: the clock's reading at the last progress.
        resumptions: how often the request may still move to other instances after a fault.
    """

    since: float
    state_timeout_s: float
    split: bool = True
    resumptions: int = MAX_RESUMPTIONS
    state: State = State.PREFILLING

    def __post_init__(self) -> None:
        self.resumed(self.split)

    def resumed(self, split: bool) -> None:
        """Other instances have been asked; `split` as in the attributes."""
        self.split = split
        self.state = State.PREFILLING if split else State.LOADING

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    def handle(self, event: Event, now: float) -> tuple[Action, ...]:
        """Moves on and says what to do. Events after the end do nothing.

        Raises:
            IllegalTransition: the event cannot happen in this state.
        """
        if self.ended:
            return ()
        if event is Event.LATE:
            event = Event.PREFILL_FAILED if OWNER[self.state] == "prefill" else Event.DECODE_FAILED
        if event is Event.DECODE_FAILED:
            self.resumptions -= 1
            event = Event.DECODE_FAILED if self.resumptions >= 0 else Event.UNPLACED
        rule = _ANYWHERE.get(event) or _RULES.get((self.state, event))
        if rule is None:
            raise IllegalTransition(f"{event} in state {self.state}")
        self.state, actions = rule
        self.since = now
        return actions

    def progressed(self, at: float) -> None:
        """The owner is at work, on this request or on those before it in its queue: a full queue is not a fault."""
        self.since = max(self.since, at)

    def late(self, now: float) -> bool:
        """Whether the state's time has run out; then `handle(Event.LATE)` is due."""
        return not self.ended and now - self.since > self.state_timeout_s
