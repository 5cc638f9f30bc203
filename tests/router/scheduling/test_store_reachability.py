"""Two instances are apart after some hand-overs in vain, in a row, for a while."""

from pdserve.router.scheduling.store_reachability import MAX_FAILED_HANDOVERS, RETRY_AFTER_S, StoreReachability

PAIR = ("prefill-0", "decode-0")


def test_only_hand_overs_in_vain_in_a_row_count_and_one_block_is_enough() -> None:
    pairs = StoreReachability()
    for _ in range(5):
        assert not any(pairs.record_handover(PAIR, 0, 0.0) for _ in range(MAX_FAILED_HANDOVERS - 1))
        assert not pairs.record_handover(PAIR, 1, 0.0) and not pairs.is_unreachable(PAIR, 0.0)


def test_it_is_told_once_and_tried_again_now_and_then() -> None:
    pairs = StoreReachability()
    assert [pairs.record_handover(PAIR, 0, 0.0) for _ in range(MAX_FAILED_HANDOVERS + 2)] == [False] * (
        MAX_FAILED_HANDOVERS - 1
    ) + [
        True,
        False,
        False,
    ]
    assert pairs.is_unreachable(PAIR, RETRY_AFTER_S - 1) and not pairs.is_unreachable(PAIR, RETRY_AFTER_S)
    assert not pairs.is_unreachable(("prefill-0", "decode-1"), 0.0)
    assert not pairs.record_handover(PAIR, 0, RETRY_AFTER_S), "no news"
    assert pairs.is_unreachable(PAIR, RETRY_AFTER_S + 1)
    pairs.record_handover(PAIR, 2, RETRY_AFTER_S + 1)
    assert not pairs.is_unreachable(PAIR, RETRY_AFTER_S + 1)


def test_who_leaves_is_forgotten() -> None:
    pairs = StoreReachability()
    other = ("prefill-1", "decode-0")
    for pair in (PAIR, other):
        for _ in range(MAX_FAILED_HANDOVERS):
            pairs.record_handover(pair, 0, 0.0)
    pairs.forget("prefill-0")
    assert not pairs.is_unreachable(PAIR, 0.0) and pairs.is_unreachable(other, 0.0)
    pairs.forget("decode-0")
    assert not pairs.is_unreachable(other, 0.0)
