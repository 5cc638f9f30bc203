"""The bounded cache: least recently used entries go first, by number and by size."""

from pdserve.grammars.cache import BoundedCache


def test_the_least_recently_used_entry_goes_first() -> None:
    cache = BoundedCache[int](max_entries=2, max_bytes=1000)
    cache.put("a", 1, 10)
    cache.put("b", 2, 10)
    assert cache.get("a") == 1
    cache.put("c", 3, 10)
    assert [cache.get(key) for key in "abc"] == [1, None, 3]


def test_sizes_are_bounded_with_their_keys() -> None:
    cache = BoundedCache[int](max_entries=100, max_bytes=100)
    for i in range(10):
        cache.put(str(i), i, 24)
    assert len(cache) == 4 and cache.num_bytes == 100
    assert [cache.get(str(i)) for i in (5, 6, 9)] == [None, 6, 9]
    cache.put("8", 8, 90)  # replaces its value, and evicts the others
    assert len(cache) == 1 and cache.num_bytes == 91


def test_a_value_beyond_the_bound_is_not_stored() -> None:
    cache = BoundedCache[int](max_entries=100, max_bytes=100)
    cache.put("a", 1, 100)
    assert cache.get("a") is None and cache.num_bytes == 0
