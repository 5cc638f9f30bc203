"""What a model's KV is: groups of layers, and the byte format that follows from them."""

from dataclasses import asdict
from typing import Any

from pdserve.keys import Layout, Section
from pdserve.kv_spec import KVGroup, KVSpec
from pdserve.proto import pdserve_pb2 as pb

FORMAT: dict[str, Any] = {"model_fingerprint": "m", "block_size": 16, "dtype": "bfloat16", "itemsize": 2}


def test_groups_that_differ_in_their_window_share_a_section() -> None:
    """So blocks of models with one shape of rows have the bytes, and the namespace, that they always had."""
    spec = KVSpec((KVGroup((1, 3), 2, 8), KVGroup((0, 2), 2, 8, window=48)))
    assert spec.places == [(0, 0), (0, 1), (0, 2), (0, 3)] and spec.window is None
    layout = spec.layout(**FORMAT)
    assert layout == Layout(num_layers=4, num_kv_heads=2, head_dim=8, **FORMAT) and not layout.more
    assert layout.namespace.hex() == "79562f27b90263345309bda19289d240"


def test_two_shapes_of_rows_are_two_sections() -> None:
    spec = KVSpec((KVGroup((2,), 1, 32), KVGroup((0, 1, 3), 2, 16, window=48)), {4: 3, 5: 2})
    assert spec.places == [(0, 0), (0, 1), (1, 0), (0, 2), (0, 2), (1, 0)]
    layout = spec.layout(**FORMAT)
    assert layout.sections == (
        Section(num_layers=3, num_kv_heads=2, head_dim=16),
        Section(num_layers=1, num_kv_heads=1, head_dim=32),
    )
    assert layout.block_bytes == (3 * 2 * 2 * 16 + 1 * 2 * 1 * 32) * 16 * 2
    others = {Layout(num_layers=3, num_kv_heads=2, head_dim=16, **FORMAT).namespace}
    others.add(KVSpec((KVGroup((0, 1, 3), 2, 16), KVGroup((2,), 2, 16, latent=True))).layout(**FORMAT).namespace)
    assert len({layout.namespace, *others}) == 3


def test_sections_reach_the_router() -> None:
    spec = KVSpec((KVGroup((0,), 2, 16), KVGroup((1,), 1, 48, latent=True)))
    layout = spec.layout(**FORMAT)
    message = pb.Layout.FromString(pb.Layout(**asdict(layout)).SerializeToString())
    assert Layout.from_message(message) == layout and Layout.from_message(message).namespace == layout.namespace


def test_windows() -> None:
    groups = (KVGroup((0,), 2, 8, window=48), KVGroup((1,), 2, 8, window=64))
    assert KVSpec(groups).window == 64
    assert KVSpec((*groups, KVGroup((2,), 2, 8))).window is None
