"""Tests of block headers."""

import os
from collections.abc import Callable

import pytest

from pdserve.keys import Layout
from pdserve.kv_transfer.header import HEADER_BYTES, HeaderFormat, is_intact

LayoutOf = Callable[..., Layout]


def test_a_header_matches_only_its_own_block(layout_of: LayoutOf) -> None:
    header_format, key, payload = HeaderFormat(layout_of(4096)), os.urandom(16), os.urandom(4096)
    header = header_format.pack(key, payload)
    assert len(header) == HEADER_BYTES == 64
    assert header_format.matches(header, key)
    assert is_intact(header, payload)
    assert not header_format.matches(header, os.urandom(16))
    assert not HeaderFormat(layout_of(4096, "another model")).matches(header, key)
    assert not HeaderFormat(layout_of(8192)).matches(header, key)
    assert not is_intact(header, payload[:-1] + bytes([payload[-1] ^ 1]))


@pytest.mark.parametrize("length", [0, 1, 63, 65])
def test_a_header_of_another_length_does_not_match(layout_of: LayoutOf, length: int) -> None:
    header_format, key = HeaderFormat(layout_of(4096)), os.urandom(16)
    assert not header_format.matches((header_format.pack(key, bytes(4096)) + b"x")[:length], key)


def test_every_byte_of_the_header_matters(layout_of: LayoutOf) -> None:
    header_format, key, payload = HeaderFormat(layout_of(4096)), os.urandom(16), os.urandom(4096)
    header = header_format.pack(key, payload)
    for offset in range(HEADER_BYTES):
        changed = bytearray(header)
        changed[offset] ^= 0x80
        assert not (header_format.matches(bytes(changed), key) and is_intact(bytes(changed), payload)), offset
