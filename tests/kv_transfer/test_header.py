import os
from collections.abc import Callable

import pytest

from pdserve.keys import Layout
from pdserve.kv_transfer.header import HEADER_BYTES, Seal, intact

LayoutOf = Callable[..., Layout]


def test_a_header_fits_its_own_block_only(layout_of: LayoutOf) -> None:
    seal, key, payload = Seal(layout_of(4096)), os.urandom(16), os.urandom(4096)
    header = seal.pack(key, payload)
    assert len(header) == HEADER_BYTES == 64
    assert seal.fits(header, key)
    assert intact(header, payload)
    assert not seal.fits(header, os.urandom(16))
    assert not Seal(layout_of(4096, "another model")).fits(header, key)
    assert not Seal(layout_of(8192)).fits(header, key)
    assert not intact(header, payload[:-1] + bytes([payload[-1] ^ 1]))


@pytest.mark.parametrize("length", [0, 1, 63, 65])
def test_a_header_of_another_length_does_not_fit(layout_of: LayoutOf, length: int) -> None:
    seal, key = Seal(layout_of(4096)), os.urandom(16)
    assert not seal.fits((seal.pack(key, bytes(4096)) + b"x")[:length], key)


def test_every_byte_of_the_header_matters(layout_of: LayoutOf) -> None:
    seal, key, payload = Seal(layout_of(4096)), os.urandom(16), os.urandom(4096)
    header = seal.pack(key, payload)
    for at in range(HEADER_BYTES):
        changed = bytearray(header)
        changed[at] ^= 0x80
        assert not (seal.fits(bytes(changed), key) and intact(bytes(changed), payload)), at
