"""Order of sequences: the level of the tenant, then the rank."""

from collections.abc import Callable

from pdserve.engine.sequence import Sequence

Place = tuple[float, int]  # level of the tenant, and rank
Order = Callable[[Sequence], Place]


def place_alone(seq: Sequence) -> Place:
    """Return the place of a sequence in the order while its tenant is alone."""
    return 0.0, seq.rank


def goes_before(waiting: Sequence, loaded: list[Sequence], first_loaded: Sequence | None, order: Order) -> bool:
    """Return whether a waiting sequence goes before `first_loaded`, the first of some loaded ones that has room.

    It overtakes none that is before it in the order, even if that lacks room, nor one of its level that only decodes.
    """
    if order(waiting) >= min(map(order, loaded)):
        return False
    has_rivals = any(order(seq)[0] <= order(waiting)[0] for seq in loaded)
    return not has_rivals or (first_loaded is not None and not first_loaded.kv.is_decoding)
