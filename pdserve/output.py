"""Outputs: what an instance sends of its requests, as frames carry it, roles write it and streams read it."""

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from pdserve.beam_search import Hypothesis
from pdserve.request import Count, TokenLogprobs


class Failure(Struct, frozen=True):
    """Why a request has failed, as an instance tells it; the kinds are those of `pdserve.errors`."""

    kind: str
    message: str = ""


class Stored(Struct, omit_defaults=True, forbid_unknown_fields=True):
    """Progress of prefill: what it has stored of a prompt.

    Attributes:
        num_blocks: leading blocks that can be loaded.
        final: no more blocks will be stored.
        tickets: opaque, from the connector; only those not reported before.
        coming: leading blocks stored or being stored, for connectors with which a load can follow a store.
    """

    num_blocks: Count = 0
    final: bool = False
    tickets: list[bytes] = []
    coming: Count = 0


class Sources(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Sources of the KV of a prompt, in tokens: computed, prefix hits in the pool, or loaded from the KV store."""

    computed: Count = 0
    local_hit: Count = 0
    loaded: Count = 0


class Moved(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """KV that an instance has moved for a request, and the time in which at least one transfer was active."""

    blocks: Count = 0
    bytes: Count = 0
    seconds: float = 0.0


class Predicted(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Drafts of an answer, by what became of them."""

    accepted: Count = 0
    rejected: Count = 0

    def __add__(self, other: "Predicted") -> "Predicted":
        return Predicted(self.accepted + other.accepted, self.rejected + other.rejected)


class Output(Struct, omit_defaults=True, forbid_unknown_fields=True):
    """Changes of one request since its last output. A field at its default means no change.

    Attributes:
        token_ids: consecutive new tokens.
        finish_reason: `stop` (EOS or a stop token, which is the last id) or `length`: the request is over on this instance
            and its blocks are free.
        logprobs: one for each of `token_ids`, if the request asks for them.
        prompt_logprobs: one for each token of the prompt but the first, if the request asks for them. Instances send them in
            pieces, in order, the last one with the first token; clients' streams have all of them with the first token. Of
            several choices, the first one alone sends them, and its first token comes before those of the others.
        hypotheses: of a beam search, in place of tokens and with the finish reason: the answers, best first.
        embedding: float32 numbers, little-endian, with the finish reason.
        request_id: as in its `Submit`.
        error: the request is over on this instance and its blocks are free.
        stamps: stage (`pdserve.lifetime.Stage`, or RELEASED) → its age in seconds, so that no clocks need to be
            synchronised: when this was packed, and in the router when the frame was written (`InstanceFrame.waited`).
        stored: from prefill: what it has stored.
        sources: of the prompt's KV.
        moved: total transfers of this request on this instance.
        searching: a beam search has advanced.
        drafted: drafts of the steps that gave these tokens, and `predicted` those of them that a client has predicted.
    """

    token_ids: list[Count] = []
    finish_reason: str | None = None
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] = []
    hypotheses: list[Hypothesis] = []
    embedding: bytes = b""
    request_id: str = ""
    error: Failure | None = None
    stamps: dict[str, float] = {}
    stored: Stored | None = None
    sources: Sources | None = None
    moved: Moved | None = None
    searching: bool = False
    drafted: Predicted | None = None
    predicted: Predicted | None = None

    def extend(self, other: "Output") -> None:
        """Append the output that follows this one in a client's stream."""
        self.token_ids += other.token_ids
        self.logprobs += other.logprobs
        self.finish_reason = other.finish_reason


MAX_OUTPUTS = 1 << 16  # of a frame: an empty one takes a byte there, and half a KB where it is decoded
pack = msgspec.msgpack.Encoder().encode  # an output, or the list of them in `InstanceFrame.outputs`
# Of a frame. Raises ValueError: a field is unknown, or its type or range wrong.
unpack = msgspec.msgpack.Decoder(Annotated[list[Output], Meta(max_length=MAX_OUTPUTS)]).decode
