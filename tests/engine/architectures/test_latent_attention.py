"""Latent attention: what the pool holds, and which architectures are refused,.

That its tokens are those of transformers is tested with the other architectures, in test_engine.py.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from pdserve.config import EngineConfig
from pdserve.engine.architectures.adapters import Source
from pdserve.engine.architectures.latent_attention import adapt
from pdserve.engine.engine import Engine
from pdserve.engine.kv_probe import UnsupportedAttention
from pdserve.engine.memory.kv_memory import section_views
from pdserve.errors import SetupError
from pdserve.kernels import cpu, reference
from pdserve.kernels.batch import Capabilities, PagedBatch, Scores, layer_caches
from pdserve.keys import Layout

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "kv_lora_rank": 24,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "vocab_size": 64,
}


def small_model(**more: Any) -> Any:
    with torch.device("cpu"):
        config = transformers.DeepseekV3Config(**SMALL | more)
        return transformers.AutoModelForCausalLM.from_config(config)


def test_a_token_has_one_row(checkpoint: Callable[..., Path]) -> None:
    engine = Engine(EngineConfig(model=str(checkpoint("deepseek_v3")), num_blocks=4))
    layout = engine.layout
    assert (layout.latent, layout.num_kv_heads, layout.head_dim) == (True, 1, 32 + 16)
    assert section_views(engine.runner.kv.pool_NX, engine.layout)[0].shape == (4, 3, 1, 1, 16, 48)
    assert layout.block_bytes == engine.runner.kv.pool_NX[0].nbytes


def test_a_latent_of_another_shape_is_not_convertible() -> None:
    shape: dict[str, Any] = {"num_layers": 2, "num_kv_heads": 1, "block_size": 16, "dtype": "float32", "itemsize": 4}
    layout = Layout(model_fingerprint="m", head_dim=48, latent=True, **shape)
    for other in (replace(layout, head_dim=56), replace(layout, latent=False)):
        assert other.namespace != layout.namespace and not other.is_convertible_to(layout)
    ranks = [replace(layout, ranks=2, rank=rank) for rank in range(2)]
    assert all(one.is_convertible_to(layout) and one.block_bytes == layout.block_bytes for one in ranks)


NOWHERE = Source(Path(), None, "")


def change_bias(layer: Any) -> None:
    layer.kv_b_proj = torch.nn.Linear(24, 44, bias=True)


def change_order(layer: Any) -> None:
    original = layer.expand_kv
    layer.expand_kv = lambda c, k: tuple(reversed(original(c, k)))


def change_sparsity(layer: Any) -> None:
    layer.indexer = torch.nn.Identity()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (change_bias, "quantized or has a bias"),
        (change_order, "expand to other keys and values"),
        (change_sparsity, "select the tokens to which they attend"),
    ],
)
def test_other_expansions_are_refused(change: Callable[[Any], None], reason: str) -> None:
    model = small_model()
    change(model.model.layers[0].self_attn)
    with pytest.raises(UnsupportedAttention, match=reason):
        adapt(model, NOWHERE)


def test_kernels_of_gpus_refuse_latents(checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    other = SimpleNamespace(NAME="triton", CAPABILITIES=Capabilities())
    monkeypatch.setattr("pdserve.engine.model_runner.select_kernel", lambda *_: other)
    with pytest.raises(
        SetupError, match=r"DeepseekV3ForCausalLM is not supported by the kernel triton: .* --device cpu"
    ):
        Engine(EngineConfig(model=str(checkpoint("deepseek_v3")), num_blocks=4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_attends_over_rows_as_wide_as_those_of_deepseek(dtype: torch.dtype) -> None:
    """K and V are the same memory, and all heads share one."""
    random, kv_lens = torch.Generator().manual_seed(0), [70, 200, 90]
    pool = torch.randn((40, 1, 1, 1, 16, 576), generator=random).mul(0.3).to(dtype)
    batch = PagedBatch(
        caches=layer_caches(pool),
        slots_T=torch.zeros(39, dtype=torch.long),
        tables_SM=torch.stack([torch.randperm(40, generator=random)[:13] for _ in kv_lens]),
        query_lens=[1, 1, 37],
        kv_lens=kv_lens,
        kv_lens_S=torch.tensor(kv_lens),
        starts=torch.tensor([0, 1, 2, 39]),
        kernel=cpu,
    )
    q_THD = torch.randn((39, 128, 576), generator=random).to(dtype)
    got = cpu.attend(q_THD, batch.caches[0], batch, Scores(0.07))
    expected = reference.attend(q_THD.float(), batch.caches[0].float(), batch, Scores(0.07))
    torch.testing.assert_close(got.float(), expected, rtol=0, atol=torch.finfo(dtype).eps)
