"""Two instances are apart after some hand-overs in vain, in a row, for a while."""

from pdserve.router.scheduling.store_reachability import MAX_FAILED_HANDOVERS, RETRY_S, StoreReachability

PAIR = ("prefill-0", "decode-0")


def test_only_hand_overs_in_vain_in_a_row_count_and_one_block_is_enough() -> None:
    pairs = StoreReachability()
    for _ in range(5):
        assert not any(pairs.handed_over(PAIR, 0, 0.0) for _ in range(MAX_FAILED_HANDOVERS - 1))
        assert not pairs.handed_over(PAIR, 1, 0.0) and not pairs.apart(PAIR, 0.0)


def test_it_is_told_once_and_tried_again_now_and_then() -> None:
    pairs = StoreReachability()
    assert [pairs.handed_over(PAIR, 0, 0.0) for _ in range(MAX_FAILED_HANDOVERS + 2)] == [False] * (
        MAX_FAILED_HANDOVERS - 1
    ) + [
        True,
        False,
        False,
    ]
    assert pairs.apart(PAIR, RETRY_S - 1) and not pairs.apart(PAIR, RETRY_S)
    assert not pairs.apart(("prefill-0", "decode-1"), 0.0)
    assert not pairs.handed_over(PAIR, 0, RETRY_S), "no news"
    assert pairs.apart(PAIR, RETRY_S + 1)
    pairs.handed_over(PAIR, 2, RETRY_S + 1)
    assert not pairs.apart(PAIR, RETRY_S + 1)


def test_who_leaves_is_forgotten() -> None:
    pairs = StoreReachability()
    other = ("prefill-1", "decode-0")
    for pair in (PAIR, other):
        for _ in range(MAX_FAILED_HANDOVERS):
            pairs.handed_over(pair, 0, 0.0)
    pairs.forget("prefill-0")
    assert not pairs.apart(PAIR, 0.0) and pairs.apart(other, 0.0)
    pairs.forget("decode-0")
    assert not pairs.apart(other, 0.0)
