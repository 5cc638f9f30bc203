"""Requests on their way through the router."""

from pdserve.keys import KeyChain, root_key
from pdserve.router.routed_request import prompt_keys


def test_instances_can_make_the_keys_of_a_prompt_from_what_they_are_sent() -> None:
    prompt = [7 * i % 250 for i in range(70)]
    keys, packed = prompt_keys(prompt, b"model", "salt", frozenset({16, 32}))
    root = root_key(model_digest=b"model", salt="salt")
    assert len(packed) == 16 * (len(prompt) // 16), "a hash of each 16 tokens"
    assert {size: KeyChain(root, packed).block_keys(prompt, size) for size in (16, 32)} == keys
    assert {size: len(found) for size, found in keys.items()} == {16: 4, 32: 2}
