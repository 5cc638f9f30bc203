"""KV probe: what a model's KV is, as its attention layers show it while two tokens pass the model."""

from collections.abc import Collection
from typing import Any

import torch

from pdserve.kv_spec import KVGroup, KVSpec


class UnsupportedAttention(Exception):
    """The model needs an attention feature that the paged kernels do not implement."""


class KVProbe:
    """Stands in for the batch of a step, and notes what each layer would write."""

    def __init__(self) -> None:
        self._kv: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # kept, so that no other tensor gets the memory
        self._windows: dict[int, int | None] = {}
        self._states: dict[tuple[int, str], int] = {}

    def keep_state(self, layer: int, kind: str, count: int) -> None:
        """Record that a layer keeps a state of one kind, and how many float32 numbers it has."""
        self._states[layer, kind] = count

    def attend(
        self, layer: int, q_1HTD: torch.Tensor, k_1GTD: torch.Tensor, v_1GTD: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        """Note a layer's K, V and window. Return a result [1, T, H, D] of zeros."""
        self._kv[layer] = k_1GTD, v_1GTD
        self._windows[layer] = window
        return torch.zeros_like(q_1HTD.transpose(1, 2))

    def spec(self, num_layers: int, num_heads: int | None = None, without: Collection[int] = ()) -> KVSpec:
        """Return the KV of the model that has passed.

        Args:
            num_heads: KV heads of the whole model, where this is a rank's part of it.
            without: layers that keep nothing of a token.

        Raises:
            UnsupportedAttention: a layer has not asked for attention, and has no state that is known.
        """
        with_states = {layer for layer, _ in self._states}
        if not self._kv or {*self._kv, *with_states, *without} != set(range(num_layers)):
            raise UnsupportedAttention("not all of its layers use the attention interface")
        first, reads, windows = dict[tuple[Any, ...], int](), dict[int, int](), dict(self._windows)
        for layer in sorted(self._kv):
            source = first.setdefault(tuple(map(_identity, self._kv[layer])), layer)
            if source != layer:  # it was given the other one's tensors
                reads[layer] = source
                windows[source] = _longer(windows[source], windows.pop(layer))
        groups = dict[tuple[int, int, bool, int | None], list[int]]()
        for layer, window in sorted(windows.items()):
            k_1GTD, v_1GTD = self._kv[layer]
            latent, heads = _identity(k_1GTD) == _identity(v_1GTD), k_1GTD.shape[1]
            if num_heads is not None and not latent:
                heads = num_heads
            groups.setdefault((heads, k_1GTD.shape[3], latent, window), []).append(layer)
        kv_groups = tuple(KVGroup(tuple(layers), *what) for what, layers in groups.items())
        return KVSpec(kv_groups, reads, self._states, num_layers - len(self._kv))


@torch.inference_mode()
def probe(model: Any, num_layers: int, num_heads: int | None = None) -> KVSpec:
    """Let two tokens pass a model, and return its KV; see `KVProbe.spec`.

    Raises:
        UnsupportedAttention: a layer does not use the attention interface, or needs what the kernels do not support.
    """
    ids_1T, seen = torch.tensor([[0, 0]], device=model.device), KVProbe()
    positions_1T, last = torch.arange(2, device=model.device)[None], torch.tensor([1], device=model.device)
    try:
        model(input_ids=ids_1T, position_ids=positions_1T, logits_to_keep=last, use_cache=False, paged=seen)
    except TypeError as error:
        if "paged" not in str(error):
            raise  # a defect, not a model that rejects the `paged` argument
        raise UnsupportedAttention(str(error)) from error
    types = getattr(model.config.get_text_config(), "layer_types", None) or ()
    return seen.spec(num_layers, num_heads, [layer for layer, kind in enumerate(types) if kind in ("mlp", "moe")])


def _identity(x: torch.Tensor) -> tuple[Any, ...]:
    return x.data_ptr(), x.shape, x.stride()


def _longer(window: int | None, other: int | None) -> int | None:
    return None if window is None or other is None else max(window, other)
