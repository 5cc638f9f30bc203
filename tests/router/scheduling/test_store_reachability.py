"""Pairs become unreachable after consecutive failed hand-overs, for a while."""

from pdserve.router.scheduling.store_reachability import MAX_FAILED_HANDOVERS, RETRY_AFTER_S, StoreReachability

PAIR = ("prefill-0", "decode-0")


def test_one_block_resets_the_count_of_failures() -> None:
    reachability = StoreReachability()
    for _ in range(5):
        assert not any(reachability.record_handover(PAIR, 0, 0.0) for _ in range(MAX_FAILED_HANDOVERS - 1))
        assert not reachability.record_handover(PAIR, 1, 0.0) and not reachability.is_unreachable(PAIR, 0.0)


def test_failure_is_reported_once_and_the_pair_retried_after_a_while() -> None:
    reachability = StoreReachability()
    assert [reachability.record_handover(PAIR, 0, 0.0) for _ in range(MAX_FAILED_HANDOVERS + 2)] == [False] * (
        MAX_FAILED_HANDOVERS - 1
    ) + [
        True,
        False,
        False,
    ]
    assert reachability.is_unreachable(PAIR, RETRY_AFTER_S - 1) and not reachability.is_unreachable(PAIR, RETRY_AFTER_S)
    assert not reachability.is_unreachable(("prefill-0", "decode-1"), 0.0)
    assert not reachability.record_handover(PAIR, 0, RETRY_AFTER_S), "not the first time"
    assert reachability.is_unreachable(PAIR, RETRY_AFTER_S + 1)
    reachability.record_handover(PAIR, 2, RETRY_AFTER_S + 1)
    assert not reachability.is_unreachable(PAIR, RETRY_AFTER_S + 1)


def test_forget_drops_all_pairs_of_an_instance() -> None:
    reachability = StoreReachability()
    other = ("prefill-1", "decode-0")
    for pair in (PAIR, other):
        for _ in range(MAX_FAILED_HANDOVERS):
            reachability.record_handover(pair, 0, 0.0)
    reachability.forget("prefill-0")
    assert not reachability.is_unreachable(PAIR, 0.0) and reachability.is_unreachable(other, 0.0)
    reachability.forget("decode-0")
    assert not reachability.is_unreachable(other, 0.0)
