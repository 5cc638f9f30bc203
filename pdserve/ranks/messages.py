"""Messages between rank 0 and the followers, as MessagePack over a socket pair.

Commands are carried out in the order in which rank 0 sends them. Transfers begin in that order and end in any; each end is
answered with the number of its operation.
"""

from typing import Any

import msgspec

from pdserve.kv_transfer.connector import Outcome, Result
from pdserve.ranks.table_changes import TableChange


class Message(msgspec.Struct, tag=True, array_like=True):
    """Base of all messages."""


class Step(Message):
    """Compute a step of the model.

    Attributes:
        ids: uint32, the new tokens of all sequences.
        counts: new tokens of each sequence.
        computed: tokens of each sequence that have KV.
        tables: what is new in the block table of each sequence.
        logit_rows: positions in `ids` of the tokens whose logits rank 0 needs.
        tails: what is new in the tables of each further group of layers.
    """

    ids: bytes
    counts: list[int]
    computed: list[int]
    tables: list[TableChange]
    logit_rows: list[int]
    tails: list[list[TableChange]] = []


class OnMemory(Message):
    """Call a method of the KV memory as rank 0 does, such as `copy_blocks`."""

    method: str
    arguments: list[Any]


class OnAdapters(Message):
    """Call a method of the layers with adapters as rank 0 does, see `pdserve/adapters/ranked_layers.py`."""

    method: str
    arguments: list[Any]


class Attach(Message):
    """Connect to the KV store."""


class Transfer(Message):
    """Move slices of blocks by a method of the connector: store, load or follow."""

    operation: int
    method: str
    keys: list[bytes]
    blocks: list[int]
    options: dict[str, Any]


class Match(Message):
    operation: int
    keys: list[bytes]


class OnLeases(Message):
    """Call a method of the connector that moves nothing: release, release_blocks or prolong."""

    method: str
    keys: list[bytes]
    options: dict[str, Any]


class Convert(Message):
    """Load KV of another layout, as `SourceLoader.load`. `layout` has the fields of that layout, `at` is the group."""

    operation: int
    layout: dict[str, Any]
    at: int
    keys: list[bytes]
    first_token: int
    stop_token: int
    blocks: list[int]
    tickets: list[bytes]


class ReleaseConverted(Message):
    layout: dict[str, Any]
    at: int
    keys: list[bytes]
    tickets: list[bytes]


class Cancel(Message):
    operation: int


class Close(Message):
    """End."""


Command = (
    Step | OnMemory | OnAdapters | Attach | Transfer | Match | OnLeases | Convert | ReleaseConverted | Cancel | Close
)


class Alive(Message):
    """The process runs. Sent every `ALIVE_S`, whatever it is doing."""


class Ready(Message):
    """The model is loaded, or the KV store is connected."""


class Failed(Message):
    """The rank cannot start, for a reason that is the deployer's to mend."""

    reason: str


class Transferred(Message):
    operation: int
    outcomes: list[Outcome]
    seconds: float
    ticket: bytes
    is_held: bool

    def result(self) -> Result:
        return Result(self.outcomes, self.seconds, self.ticket)


class Matched(Message):
    operation: int
    count: int


class Released(Message):
    """Notice that blocks which a store held (`Result.held`) may be reused."""

    operation: int


Reply = Alive | Ready | Failed | Transferred | Matched | Released

_COMMANDS: "msgspec.msgpack.Decoder[Command]" = msgspec.msgpack.Decoder(Command)
_REPLIES: "msgspec.msgpack.Decoder[Reply]" = msgspec.msgpack.Decoder(Reply)
encode = msgspec.msgpack.Encoder().encode
decode_command = _COMMANDS.decode
decode_reply = _REPLIES.decode
ALIVE_S = 1.0
