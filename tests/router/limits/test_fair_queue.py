"""Properties of the fair queue over arbitrary sequences of requests."""

from hypothesis import given
from hypothesis import strategies as st

from pdserve.request import ARRIVALS_PER_PRIORITY
from pdserve.router.limits.admission_queue import FairQueue

KEYS = "abc"
WEIGHTS = st.fixed_dictionaries({key: st.sampled_from([0.5, 1.0, 2.0, 5.0]) for key in KEYS})
LARGEST = 50
TOKENS = st.integers(1, LARGEST)
TURNS = st.lists(st.tuples(st.sampled_from(KEYS), TOKENS), max_size=200)


@given(weights=WEIGHTS, sizes=st.lists(st.tuples(TOKENS, TOKENS), min_size=50, max_size=150), turns=st.integers(1, 150))
def test_shares_follow_weights(weights: dict[str, float], sizes: list[tuple[int, int]], turns: int) -> None:
    """While two keys stay backlogged, their service per weight differs by at most one request of each."""
    queue = FairQueue[tuple[str, int]](weights)
    for prompt, output in sizes:
        for key in "ab":
            queue.push(key, (key, output), prompt if key == "a" else LARGEST + 1 - prompt)
    got = dict.fromkeys("ab", 0.0)
    waiting = dict.fromkeys("ab", len(sizes))
    for _ in range(turns):
        before = {key: queue._queues[key].counter for key in "ab"}
        key, output = queue.pop()
        queue.charge(key, output)  # the whole output at once, as if the request had ended
        got[key] += queue._queues[key].counter - before[key]
        waiting[key] -= 1
        if not all(waiting.values()):
            return
        assert abs(got["a"] - got["b"]) <= 2 * LARGEST / weights["a"] + 2 * LARGEST / weights["b"]


@given(weights=WEIGHTS, turns=st.lists(st.tuples(st.sampled_from(KEYS), TOKENS, st.booleans()), max_size=50))
def test_an_item_that_passes_by_is_charged_as_if_it_had_been_queued(
    weights: dict[str, float], turns: list[tuple[str, int, bool]]
) -> None:
    one, other = FairQueue[int](weights), FairQueue[int](weights)
    for key, tokens, passes in turns:
        if passes:
            one.pass_by(key, tokens)
        else:
            one.push(key, tokens, tokens)
            assert one.pop() == tokens
        other.push(key, tokens, tokens)
        assert other.pop() == tokens and not one.backlogged
        one.charge(key, 3)
        other.charge(key, 3)
        assert [one._queues[name].counter for name in KEYS] == [other._queues[name].counter for name in KEYS]


@given(weights=WEIGHTS, early=TURNS, greedy=st.sampled_from("ab"))
def test_no_key_starves(weights: dict[str, float], early: list[tuple[str, int]], greedy: str) -> None:
    """The tokens of another key that are served ahead of an item are bounded, however many requests arrive later."""
    queue = FairQueue[str](weights)
    for key, tokens in early:
        queue.push(key, key, tokens)
        if len(queue) > 2:
            queue.pop()
    while queue.peek() is not None:
        queue.pop()
    queue.push("c", "item", 1)
    bound = int(LARGEST * weights[greedy] / weights["c"]) + 1
    ahead = []
    for _ in range(bound + 1):
        queue.push(greedy, greedy, 1)
        ahead.append(queue.pop())
    assert "item" in ahead


@given(weights=WEIGHTS, turns=TURNS)
def test_every_item_leaves_exactly_once(weights: dict[str, float], turns: list[tuple[str, int]]) -> None:
    queue, pushed, removed = FairQueue[int](weights), set[int](), set[int]()
    for number, (key, tokens) in enumerate(turns):
        queue.push(key, number, tokens)
        pushed.add(number)
        if tokens % 3 == 0:
            removed.add(queue.pop())
        elif tokens % 7 == 0:
            queue.remove(key, number)
            removed.add(number)
        elif tokens % 11 == 0:
            removed.add(queue.drop())
        assert len(queue) == len(pushed) - len(removed)
    while queue.peek() is not None:
        first = queue.peek()
        assert first == queue.pop() and first not in removed
        removed.add(first)
    assert removed == pushed and len(queue) == 0


def test_an_idle_key_saves_up_no_credit() -> None:
    queue = FairQueue[str]({"a": 1.0, "b": 1.0})
    for _ in range(100):
        queue.push("a", "a", 10)
        queue.pop()
    for _ in range(4):
        queue.push("a", "a", 10)
        queue.push("b", "b", 10)
    assert "".join(queue.pop() for _ in range(8)) in {"babababa", "bbababaa"}, "the keys alternate"


def test_priority_orders_a_key_without_starving_lower_priorities() -> None:
    queue = FairQueue[int]({"a": 1.0})
    queue.push("a", 0, 1, priority=1)
    for number in range(1, ARRIVALS_PER_PRIORITY + 3):
        queue.push("a", number, 1)
        if number == 1:
            assert queue.pop() == 1, "a lower priority value goes first although it arrived later"
    order = [queue.pop() for _ in range(ARRIVALS_PER_PRIORITY + 2)]
    assert order[:2] == [2, 3] and order.index(0) == ARRIVALS_PER_PRIORITY - 2, (
        "after one level of arrivals, before the rest"
    )


def test_drop_takes_the_last_item_of_the_heaviest_key() -> None:
    queue = FairQueue[str]({"a": 1.0, "b": 1.0, "c": 4.0})
    for item in ("a1", "a2", "b1", "c1", "c2", "c3"):
        queue.push(item[0], item, 1)
    assert queue.drop() == "a2"
    assert queue.drop() in {"a1", "b1"}, "c has the longest queue, but not for its weight"


@given(weights=WEIGHTS, turns=TURNS)
def test_passing_an_empty_queue_charges_as_waiting_in_it_does(
    weights: dict[str, float], turns: list[tuple[str, int]]
) -> None:
    passed, waited = FairQueue[str](weights), FairQueue[str](weights)
    for key, tokens in turns:
        passed.pass_by(key, tokens)
        waited.push(key, key, tokens)
        waited.pop()
    for queue in (passed, waited):
        for key in KEYS:
            queue.push(key, key, 1)
    assert [passed.pop() for _ in KEYS] == [waited.pop() for _ in KEYS]
