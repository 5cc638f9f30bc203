"""Hand-over state machine of one request. Sans-IO: events go in, actions come out.

        ┌─── prefill failed ─────────┬─── prefill failed ───────┐
        │                            │                          ▼
    PREFILLING ─ first token ─► TRANSFERRING ─ all stored ─► LOADING ─ decoded token ─► DECODING ─ last token ─► FINISHED
    owner: prefill              owner: prefill               owner: decode              owner: decode
                                     │                                                     ▲
                                     └─ decoded token, before prefill's final report ──────┘
    In any state:
        last token ──► FINISHED
        cancelled by the client ──► CANCELLED
        decode drained ──► PREFILLING, on other instances
        decode failed ──► PREFILLING, on other instances, up to MAX_MIGRATIONS times without a decoded token; then ──► FAILED
        no instance eligible ──► WAITING ─ an instance attached, or was heard from ─► PREFILLING

The owner of a state is the instance that must act next. An instance has failed if it is lost, or if the timeout of a state
that it owns expires. The timeout starts again with each event, and with each token that the owner produces for any request of
this router: a long queue is not a fault. The engine steps that the owner reports are only its word, and it may be working for
other routers, so they prolong a state to at most `STEPS_LIMIT` timeouts. A request as a whole ends after `REQUEST_LIMIT`
timeouts and a second for each of its tokens.

A failed prefill only costs time: decode is told that no more KV will come, computes the missing KV, and samples the first
token itself if necessary, so the tokens are the same. A failed decode also only costs time as long as other instances can
take over: prompt plus emitted tokens are prefilled again, and the stream continues after the last emitted token. If many
instances go at once, the router learns of one after another. A request that moved from each to the next would seem to be the
cause, so after the second fault in a row it only moves to an instance that has been heard from since.

A request in WAITING is on no instance, so nothing owns this state, and its timeout is the dispatcher's.

On every exit, each instance that still holds blocks of the request is told to release them. CANCEL_PREFILL and CANCEL_DECODE
have no effect on an instance that has finished.
"""

import math
from dataclasses import dataclass, field
from enum import StrEnum


class State(StrEnum):
    """States of a hand-over; the last three are final."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    TRANSFERRING = "transferring"
    LOADING = "loading"
    DECODING = "decoding"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Event(StrEnum):
    """Inputs of the machine."""

    FIRST_TOKEN = "first_token"  # prefill has sampled the first token
    PREFILLED = "prefilled"  # prefill has stored all KV of a beam search, of which it samples no token
    STORED = "stored"  # prefill has stored all KV, or all that it ever will
    DECODED = "decoded"  # decode has produced a token
    FINISHED = "finished"  # the owner reports that the output is complete
    PREFILL_FAILED = "prefill_failed"
    DECODE_FAILED = "decode_failed"
    TIMED_OUT = "timed_out"  # no progress within the state's timeout
    DRAINED = "drained"  # decode is draining, and other instances can take over
    REJECTED = "rejected"  # no instance can take the request, or it was rejected: a retry would not help
    CANCELLED = "cancelled"  # the client disconnected, or has all that it asked for


class Action(StrEnum):
    """Outputs of the machine, for the dispatcher to carry out."""

    FINALIZE = "finalize"  # tell decode that no more KV will be stored
    CANCEL_PREFILL = "cancel_prefill"
    CANCEL_DECODE = "cancel_decode"
    MIGRATE = "migrate"  # select other instances, submit prompt plus emitted tokens, and call `restart`
    FAIL = "fail"  # end the client's stream with an error


OWNER: dict[State, str] = {
    State.PREFILLING: "prefill",
    State.TRANSFERRING: "prefill",
    State.LOADING: "decode",
    State.DECODING: "decode",
}
FINAL_STATES = frozenset({State.FINISHED, State.FAILED, State.CANCELLED})

STEPS_LIMIT = 10  # timeouts that a state may last while the owner shows no work other than engine steps
REQUEST_LIMIT = 100  # timeouts that a request may last, besides `SECONDS_PER_TOKEN` for each token
SECONDS_PER_TOKEN = 1.0
# After faults, not drains, while decode produces no token: then it may be the request over which instances fail.
MAX_MIGRATIONS = 3
_CANCEL_BOTH = (Action.CANCEL_PREFILL, Action.CANCEL_DECODE)
_Transition = tuple[State, tuple[Action, ...]]

# Transitions of events that mean the same in all states that are not final.
_FROM_ANY_STATE: dict[Event, _Transition] = {
    Event.FINISHED: (State.FINISHED, _CANCEL_BOTH),
    Event.DECODE_FAILED: (State.PREFILLING, (*_CANCEL_BOTH, Action.MIGRATE)),
    Event.DRAINED: (State.PREFILLING, (*_CANCEL_BOTH, Action.MIGRATE)),
    Event.REJECTED: (State.FAILED, (Action.FAIL, *_CANCEL_BOTH)),
    Event.CANCELLED: (State.CANCELLED, _CANCEL_BOTH),
}
# Of a request that is on no instance.
_WHILE_WAITING: dict[Event, _Transition] = {
    Event.REJECTED: (State.FAILED, (Action.FAIL,)),
    Event.CANCELLED: (State.CANCELLED, ()),
}
# Prefill reports nothing in LOADING: its final report has arrived, or it is cancelled. No row accepts a second first token.
_TRANSITIONS: dict[tuple[State, Event], _Transition] = {
    (State.PREFILLING, Event.FIRST_TOKEN): (State.TRANSFERRING, ()),
    (State.PREFILLING, Event.PREFILLED): (State.LOADING, ()),
    (State.PREFILLING, Event.PREFILL_FAILED): (State.LOADING, (Action.FINALIZE, Action.CANCEL_PREFILL)),
    (State.TRANSFERRING, Event.STORED): (State.LOADING, ()),
    # Decode had all the KV it needed in its pool, or loaded it while it was being stored.
    (State.TRANSFERRING, Event.DECODED): (State.DECODING, ()),
    (State.TRANSFERRING, Event.PREFILL_FAILED): (State.LOADING, (Action.FINALIZE, Action.CANCEL_PREFILL)),
    (State.LOADING, Event.DECODED): (State.DECODING, ()),
    # Decode may outrun prefill's final report, and then needs nothing more of it.
    (State.DECODING, Event.STORED): (State.DECODING, ()),
    (State.DECODING, Event.PREFILL_FAILED): (State.DECODING, ()),
    (State.DECODING, Event.DECODED): (State.DECODING, ()),
}


class IllegalTransition(AssertionError):
    """An instance reported an event that is impossible in the current state: a fault of the instance, not of the client."""


@dataclass
class HandOverMachine:
    """State of one request's hand-over.

    Attributes:
        last_progress_at: time of the last event, or of the last token that the owner has produced since, on the caller's
            clock.
        state_timeout_s: maximum time without progress in each state that has an owner.
        max_tokens: tokens that the request may generate.
        is_over: the state is final.
        last_step_at: when the owner last reported an engine step.
        is_split: prefill and decode are different instances. If not, the one instance owns everything, and its failure is a
            decode failure.
        migrations_left: how many more times the request may migrate after a fault before decode produces a token; negative
            once that is exceeded.
        faults: after which it has migrated, or ended.
        is_suspect: it has lost its instances to at least two faults in a row, of which it may be the cause.
    """

    last_progress_at: float
    state_timeout_s: float
    max_tokens: int = 0
    is_split: bool = True
    migrations_left: int = MAX_MIGRATIONS
    faults: int = 0
    state: State = State.PREFILLING
    is_over: bool = field(default=False, init=False)
    last_step_at: float = field(default=-math.inf, init=False)

    def __post_init__(self) -> None:
        request_limit_s = REQUEST_LIMIT * self.state_timeout_s + SECONDS_PER_TOKEN * self.max_tokens
        self._ends_at = self.last_progress_at + request_limit_s
        self.restart(self.is_split, self.last_progress_at)

    @property
    def is_suspect(self) -> bool:
        return self.migrations_left < MAX_MIGRATIONS - 1

    def wait(self) -> None:
        """Wait for an instance: none is eligible."""
        assert not self.is_over
        self.state = State.WAITING

    def restart(self, is_split: bool, now: float) -> None:
        """Begin anew: the request has been submitted to other instances."""
        self.is_split, self.last_progress_at = is_split, now
        self.state = State.PREFILLING if is_split else State.LOADING  # alone, the final instance owns every state

    def handle(self, event: Event, now: float) -> tuple[Action, ...]:
        """Make the transition and return its actions. Events in a final state have no effect.

        Raises:
            IllegalTransition: the event is impossible in this state.
        """
        if self.is_over:
            return ()
        if event is Event.TIMED_OUT and self.state in OWNER:
            event = Event.PREFILL_FAILED if OWNER[self.state] == "prefill" else Event.DECODE_FAILED
        if event is Event.DECODED:
            self.migrations_left = MAX_MIGRATIONS
        elif event is Event.DECODE_FAILED:
            self.migrations_left -= 1
            self.faults += 1
            event = Event.DECODE_FAILED if self.migrations_left >= 0 else Event.REJECTED
        if self.state is State.WAITING:
            transition = _WHILE_WAITING.get(event)
        else:
            transition = _FROM_ANY_STATE.get(event) or _TRANSITIONS.get((self.state, event))
        if transition is None:
            raise IllegalTransition(f"{event} in state {self.state}")
        self.state, actions = transition
        self.is_over = self.state in FINAL_STATES
        self.last_progress_at = now
        return actions

    def record_progress(self, token_at: float, step_at: float) -> None:
        """Record the owner's work: when it last produced a token for any request, and when it last reported a step."""
        self.last_progress_at = max(self.last_progress_at, token_at)
        self.last_step_at = step_at

    def is_timed_out(self, now: float) -> bool:
        """Return True if the state's timeout has expired; the caller then handles `Event.TIMED_OUT`."""
        if self.state is State.WAITING:
            return False
        latest_step = self.last_progress_at + (STEPS_LIMIT - 1) * self.state_timeout_s
        worked_at = max(self.last_progress_at, min(self.last_step_at, latest_step))
        return not self.is_over and now - worked_at > self.state_timeout_s

    def is_overdue(self, now: float) -> bool:
        """Return True if the whole request has taken too long; the caller then handles `Event.REJECTED`."""
        return not self.is_over and now > self._ends_at
