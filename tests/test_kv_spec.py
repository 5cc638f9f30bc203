"""What a model's KV is: groups of layers, and the byte format that follows from them."""

from dataclasses import asdict, replace
from typing import Any

from pdserve.keys import STATE_WINDOW, Layout, Section
from pdserve.kv_spec import KVGroup, KVSpec
from pdserve.proto import pdserve_pb2 as pb

FORMAT: dict[str, Any] = {"model_fingerprint": "m", "block_size": 16, "dtype": "bfloat16", "itemsize": 2}


def test_layers_of_one_window_have_the_namespace_that_they_always_had() -> None:
    for window in (None, 48):
        spec = KVSpec((KVGroup((0, 1, 2, 3), 2, 8, window=window),))
        layout = spec.layout(**FORMAT)
        assert layout == Layout(num_layers=4, num_kv_heads=2, head_dim=8, **FORMAT) and layout.groups == (layout,)
        assert layout.namespace.hex() == "79562f27b90263345309bda19289d240"


def test_layers_of_two_windows_are_two_groups_with_blocks_of_their_own() -> None:
    spec = KVSpec((KVGroup((0, 2, 4), 2, 8, window=48), KVGroup((1, 3), 2, 8)))
    assert spec.windows == [None, 48] and spec.places == [(1, 0), (0, 0), (1, 1), (0, 1), (1, 2)]
    layout = spec.layout(**FORMAT)
    full, window = layout.groups
    assert (full.num_layers, full.window, window.num_layers, window.window) == (2, 0, 3, 48)
    assert full.block_bytes + window.block_bytes == layout.block_bytes
    assert len({full.namespace, window.namespace, layout.namespace}) == 3
    same_shape = KVSpec((KVGroup((0, 2, 4), 2, 8, window=64), KVGroup((1, 3), 2, 8))).layout(**FORMAT)
    assert same_shape.groups[1].namespace != window.namespace


def test_shapes_of_rows_are_sections_of_their_groups() -> None:
    groups = (KVGroup((2,), 1, 32), KVGroup((0, 1), 2, 16, window=48), KVGroup((3,), 1, 16, window=48))
    spec = KVSpec(groups, {4: 3, 5: 2})
    assert spec.places == [(1, 0), (1, 1), (0, 0), (2, 0), (2, 0), (0, 0)]
    layout = spec.layout(**FORMAT)
    assert layout.sections == (
        Section(num_layers=1, num_kv_heads=1, head_dim=32),
        Section(num_layers=2, num_kv_heads=2, head_dim=16, window=48),
        Section(num_layers=1, num_kv_heads=1, head_dim=16, window=48),
    )
    assert [len(group.sections) for group in layout.groups] == [1, 2]
    assert layout.groups[1].block_bytes == (2 * 2 * 2 * 16 + 1 * 2 * 1 * 16) * 16 * 2


def test_two_shapes_of_rows_are_two_sections() -> None:
    layout = KVSpec((KVGroup((0, 1, 3), 2, 16), KVGroup((2,), 2, 16, latent=True))).layout(**FORMAT)
    assert len(layout.sections) == 2 and layout.groups == (layout,)
    assert layout.namespace.hex() == "e50980c1b743f24c00134a8a8ebdf8dc"
    assert layout.namespace != Layout(num_layers=3, num_kv_heads=2, head_dim=16, **FORMAT).namespace


def test_sections_reach_the_router() -> None:
    spec = KVSpec((KVGroup((0,), 2, 16), KVGroup((1,), 1, 48, latent=True)))
    layout = spec.layout(**FORMAT)
    message = pb.Layout.FromString(pb.Layout(**asdict(layout)).SerializeToString())
    assert Layout.from_message(message) == layout and Layout.from_message(message).namespace == layout.namespace


def test_windows() -> None:
    groups = (KVGroup((0,), 2, 8, window=48), KVGroup((1,), 2, 8, window=64))
    assert KVSpec(groups).window == 64
    assert KVSpec((*groups, KVGroup((2,), 2, 8))).window is None


def test_states_are_a_last_group_of_whole_blocks_of_the_others() -> None:
    states = {(0, "convolution"): 100, (0, "recurrence"): 700, (2, "recurrence"): 30}
    spec = KVSpec((KVGroup((1,), 2, 8),), states=states, num_without=2)
    assert spec.num_layers == 3 and spec.places == [(1, 0), (0, 0), (1, 0)]
    assert spec.state_offsets == {(0, "convolution"): 0, (0, "recurrence"): 100, (2, "recurrence"): 800}
    layout = spec.layout(**FORMAT)
    full, group = layout.groups
    assert full.block_bytes == 1024 and group.block_bytes == 4096, "830 numbers of 4 bytes"
    assert group.window == STATE_WINDOW and not full.window
    for other in (replace(layout, block_size=32), replace(layout, dtype="float32"), layout):
        assert not layout.is_convertible_to(other), "only equal layouts exchange states"
