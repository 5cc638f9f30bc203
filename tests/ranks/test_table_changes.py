"""Table changes: a follower has the tables of rank 0, whatever happens to them between steps, and gets little of them."""

from hypothesis import given
from hypothesis import strategies as st

from pdserve.engine.memory.groups import BlockTable
from pdserve.engine.memory.sequence_kv import block_table
from pdserve.ranks.table_changes import ReceivedTables, SentTables

EDITS = st.lists(
    st.tuples(
        st.sampled_from(["grow", "replace", "copy on write", "join", "leave", "turn", "draft"]), st.integers(0, 99)
    ),
    max_size=40,
)


@given(steps=st.lists(EDITS, max_size=12))
def test_followers_have_the_same_tables(steps: list[list[tuple[str, int]]]) -> None:
    sent, received, tables = SentTables(), ReceivedTables(), [block_table([1, 2])]
    for edits in steps:
        drafts = list[BlockTable]()
        for kind, number in edits:
            at = number % len(tables) if tables else 0
            if kind == "join" or not tables:
                tables.append(block_table(range(number % 5)))
            elif kind == "grow":
                tables[at].extend(range(number % 4))
            elif kind == "replace":  # it was preempted
                tables[at] = block_table([number])
            elif kind == "copy on write" and tables[at]:
                tables[at][number % len(tables[at])] = number
            elif kind == "leave":
                del tables[at]
            elif kind == "turn":
                tables.append(tables.pop(at))
            elif kind == "draft":  # a row of its own
                drafts.append(tables[at])
        rows = [table for table in tables for _ in range(1 + sum(one is table for one in drafts))]
        assert received.apply(sent.changes(rows)) == rows


def test_a_step_that_decodes_sends_what_is_new() -> None:
    sent: SentTables = SentTables()
    tables: list[BlockTable] = [block_table(range(row, row + 500)) for row in range(256)]
    whole = sum(len(new) for _, _, new in sent.changes(tables))
    for table in tables[::16]:
        table.append(7)
    assert sum(len(new) for _, _, new in sent.changes(tables[1:])) == 15 * 4 < whole / 1000
    assert sum(len(new) for _, _, new in sent.changes(tables)) == 501 * 4, "of the sequence that was left out"
