"""What a model's KV is, as its own attention shows it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from pdserve.engine import paged_model
from pdserve.engine.kv_probe import KVProbe, UnsupportedAttention, probe
from pdserve.kv_spec import KVGroup, KVSpec

SLIDING, FULL = KVGroup((0, 1, 3), 2, 16, window=48), KVGroup((2,), 1, 32)


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("llama", KVSpec.uniform(3, 2, 16)),
        ("mistral", KVSpec((KVGroup((0, 1, 2), 2, 16, window=48),))),
        ("gemma2", KVSpec((KVGroup((0, 2), 2, 16, window=48), KVGroup((1,), 2, 16)))),
        ("gemma4", KVSpec((SLIDING, FULL), {4: 3, 5: 2})),
    ],
)
def test_groups(architecture: str, expected: KVSpec, checkpoint: Callable[..., Path]) -> None:
    paged_model.register()
    path = checkpoint(architecture)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation=paged_model.NAME)
    assert probe(model, model.config.num_hidden_layers) == expected


def attend(seen: KVProbe, layer: int, window: int | None, kv: torch.Tensor | None = None) -> torch.Tensor:
    kv = torch.zeros(2, 1, 2, 2, 8) if kv is None else kv
    seen.attend(layer, torch.zeros(1, 4, 2, 8), kv[0], kv[1], window)
    return kv


def test_a_reader_with_a_longer_window_lengthens_that_of_the_layer_it_reads() -> None:
    seen = KVProbe()
    kv = attend(seen, 0, 10)
    attend(seen, 1, 30, kv)
    assert seen.spec(2) == KVSpec((KVGroup((0,), 2, 8, window=30),), {1: 0})
    attend(seen, 1, None, kv)
    assert seen.spec(2).window is None


def test_rows_that_are_both_k_and_v_are_latent() -> None:
    seen = KVProbe()
    attend(seen, 0, None, torch.zeros(1, 1, 2, 2, 8).expand(2, -1, -1, -1, -1))
    assert seen.spec(1) == KVSpec((KVGroup((0,), 2, 8, latent=True),))


def test_layers_without_attention_are_refused() -> None:
    seen = KVProbe()
    attend(seen, 1, None)
    with pytest.raises(UnsupportedAttention, match="not all of its layers use the attention interface"):
        seen.spec(2)
