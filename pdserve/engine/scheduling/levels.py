"""Levels of tenants: how many running sequences each has, by weight, which of these gives way to another, and the order.

And what of each could run, if it were alone.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceABC
from operator import attrgetter

from pdserve.engine.memory.blocks import BlockPool
from pdserve.engine.sequence import Sequence
from pdserve.request import Tenant

Place = tuple[float, int]  # in the order of sequences: the level of its tenant, and its rank
Order = Callable[[Sequence], Place]
_TENANT = attrgetter("tenant")


def levels_of(running: SequenceABC[Sequence]) -> dict[Tenant, float]:
    """Return the number of running sequences of each tenant that has some, divided by its weight."""
    counts = Counter(map(_TENANT, running))
    return {tenant: count / tenant.weight for tenant, count in counts.items()}


def giving_way(running: SequenceABC[Sequence], tenants: Iterable[Tenant]) -> dict[Tenant, Sequence]:
    """Return which running sequence gives way to a new one of each tenant; without tenants that would rise to its level."""
    levels = levels_of(running)
    for level in sorted(set(levels.values()), reverse=True):
        highest = {tenant for tenant in levels if levels[tenant] == level}
        if victim := next((one for one in reversed(running) if one.tenant in highest and one.may_give_way), None):
            return {tenant: victim for tenant in tenants if levels.get(tenant, 0.0) + 1 / tenant.weight < level}
    return {}


def last_to_run(running: SequenceABC[Sequence], tenant: Tenant) -> Sequence:
    """Return the newest running sequence of the tenant of the highest level; of this one if no other is above it."""
    levels = levels_of(running)
    candidates = [one for one in reversed(running) if one.tenant == tenant or one.may_give_way]
    return max(candidates, key=lambda one: (levels[one.tenant], one.rank))


def tokens_now(
    running: Mapping[Tenant, Iterable[Sequence]], queued: Iterable[Sequence], pool: BlockPool
) -> dict[Tenant, float]:
    """Return how many tokens of each tenant this step could compute, if the tenant were alone in it.

    Args:
        queued: those for which there is a slot; they count as far as the pool has room for those of their tenant.
    """
    tokens, blocks = dict[Tenant, float](), dict.fromkeys(running, pool.num_spare)
    for tenant, seqs in running.items():
        tokens[tenant] = sum([seq.kv.num_uncomputed for seq in seqs])
    for seq in queued:
        blocks[seq.tenant] -= seq.kv.blocks_needed(pool)
        if blocks[seq.tenant] >= 0:
            tokens[seq.tenant] += seq.kv.num_uncomputed
    return tokens


def place_alone(seq: Sequence) -> Place:
    """Return the place of a sequence in the order while its tenant is alone."""
    return 0.0, seq.rank


def precedes(waiting: Sequence, loaded: list[Sequence], first_loaded: Sequence | None, order: Order) -> bool:
    """Return whether a waiting sequence goes before `first_loaded`, the first of some loaded ones that has room.

    It overtakes none that is before it in the order, even if that lacks room, nor one of its level that only decodes.
    """
    if order(waiting) >= min(map(order, loaded)):
        return False
    has_rivals = any(order(seq)[0] <= order(waiting)[0] for seq in loaded)
    return not has_rivals or (first_loaded is not None and not first_loaded.kv.is_decoding)
