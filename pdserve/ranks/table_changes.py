"""Changes of the block tables from step to step: what rank 0 sends of them, and how followers apply it. Plain Python.

The tables of 256 sequences of 8,000 tokens take half a megabyte; of a step that decodes, a few kilobytes of it are new.
"""

from array import array
from collections.abc import Sequence

from pdserve.engine.memory.groups import BlockTable
from pdserve.engine.memory.sequence_kv import block_table

TableChange = tuple[
    int, int, bytes
]  # row of the step before that has the same leading ids, how many; uint32 of the others


class SentTables:
    """The tables of the last step, as rank 0 has sent them."""

    def __init__(self) -> None:
        self._sent: dict[int, tuple[int, BlockTable, BlockTable]] = {}  # by identity: row, the table, and a copy

    def changes(self, tables: list[BlockTable]) -> list[TableChange]:
        """Return how to make the tables of a step, one per row, from those before. A sequence may have several rows."""
        changes, sent = list[TableChange](), dict[int, tuple[int, BlockTable, BlockTable]]()
        for row, table in enumerate(tables):
            if id(table) in sent:
                changes.append(changes[sent[id(table)][0]])
                continue
            last_row, _, copy = self._sent.get(id(table), (0, table, block_table()))
            if table[: len(copy)] != copy:
                copy = block_table()
            new = table[len(copy) :]
            changes.append((last_row, len(copy), pack_ids(new)))
            copy.extend(new)
            sent[id(table)] = row, table, copy  # the table too, since its identity would be another's once it is gone
        self._sent = sent
        return changes


class ReceivedTables:
    """The tables of the last step on a follower."""

    def __init__(self) -> None:
        self._tables: list[BlockTable] = []

    def apply(self, changes: list[TableChange]) -> list[BlockTable]:
        """Return the tables of the next step."""
        tables = []
        for row, kept, new in changes:
            table = self._tables[row][:kept] if kept else block_table()
            table.extend(unpack_ids(new))
            tables.append(table)
        self._tables = tables
        return tables


def pack_ids(ids: Sequence[int]) -> bytes:
    return array("I", ids).tobytes()


def unpack_ids(data: bytes) -> list[int]:
    return array("I", data).tolist()
