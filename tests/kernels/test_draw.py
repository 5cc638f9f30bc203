"""Sampling kernels of CPUs and of GPUs, on CPU tensors: the tokens of the torch reference, nearly always without its help."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine import sampler
from pdserve.engine.sampler import sample
from pdserve.engine.sequence import Sequence
from pdserve.kernels import elementwise, native
from pdserve.kernels.draw import draw
from pdserve.kernels.gpu.draw import CANDIDATES
from pdserve.kernels.gpu.draw import draw as gpu_draw
from pdserve.keys import token_array
from pdserve.request import SamplingParams

pytestmark = pytest.mark.usefixtures("cpu_kernel")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda x: 3 * x,
    "steep": lambda x: 60 * x,
    "flat": lambda x: x / 10,
    "few distinct values": lambda x: x.round(),
    "all equal": torch.zeros_like,
    "equal to the last bit": lambda x: 1e-20 * x,
    "one huge": lambda x: x.index_fill(1, torch.tensor([x.shape[1] // 2]), 1e4),
    "mostly forbidden": lambda x: x.masked_fill(x < 1, -torch.inf),
    "with NaN": lambda x: x.masked_fill(x > 1.5, torch.nan),
    "with infinity": lambda x: x.masked_fill(x > 1.5, torch.inf),
    "all forbidden": lambda x: torch.full_like(x, -torch.inf),
    "all NaN": lambda x: torch.full_like(x, torch.nan),
}


def seqs(params: list[dict[str, Any]], first_seed: int = 0) -> list[Sequence]:
    """Return one sequence per set of sampling parameters, with consecutive seeds."""
    samplings = [SamplingParams(**{"seed": first_seed + i, **kwargs}) for i, kwargs in enumerate(params)]
    return [
        Sequence.new("r", token_array([0] * (1 + i)), 1, 1, sampling, b"", 16) for i, sampling in enumerate(samplings)
    ]


def sample_by_reference(logits_SV: torch.Tensor, rows: list[Sequence]) -> list[int]:
    with mock.patch.object(native, "is_available", lambda: False):
        return sample(logits_SV.clone(), rows)


def sample_as_on_a_gpu(logits_SV: torch.Tensor, rows: list[Sequence]) -> list[int]:
    with mock.patch.object(sampler, "_draw_function", lambda logits_SV: gpu_draw):
        return sample(logits_SV.clone(), rows)


PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([1e-300, 1e-6, 0.3, 0.6, 1.0, 1.7, 100.0]),
        "top_k": st.sampled_from([0, 0, 1, 2, 20, 1000, 2**31 - 1]),
        "top_p": st.sampled_from([1.0, 1.0, 1e-6, 0.5, 0.75, 0.95, 0.999999]) | st.floats(1e-9, 1),
        "min_p": st.sampled_from([0.0, 0.0, 0.05, 1.0]) | st.floats(0, 1),
    }
)


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from(sorted(KINDS)),
    vocab=st.sampled_from([1, 2, 15, 16, 17, 300, 2055]),
    params=st.lists(PARAMS, min_size=1, max_size=6),
    seed=st.integers(0, 2**63 - 99),
)
def test_tokens_equal_the_reference(
    dtype: torch.dtype, kind: str, vocab: int, params: list[dict[str, Any]], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits_SV = KINDS[kind](torch.randn(len(params), vocab, generator=generator)).to(dtype)
    rows = seqs(params, seed)
    expected = sample_by_reference(logits_SV, rows)
    assert sample(logits_SV.clone(), rows) == expected
    assert sample_as_on_a_gpu(logits_SV, rows) == expected


@pytest.mark.parametrize(
    "filters", [{"top_k": 7}, {"top_p": 0.5}, {"top_k": 10, "top_p": 0.5}, {"min_p": 1.0}], ids=str
)
@pytest.mark.parametrize("kind", ["all equal", "equal to the last bit", "few distinct values", "plain"])
def test_ties_are_left_to_the_reference(kind: str, filters: dict[str, Any]) -> None:
    for vocab in (17, 300):
        logits_SV = KINDS[kind](torch.randn(100, vocab, generator=torch.Generator().manual_seed(vocab)))
        expected = sample_by_reference(logits_SV, seqs([filters] * 100))
        assert sample(logits_SV.clone(), seqs([filters] * 100)) == expected
        assert sample_as_on_a_gpu(logits_SV, seqs([filters] * 100)) == expected


def test_large_vocabulary() -> None:
    torch.manual_seed(0)
    params: list[dict[str, Any]] = [{}, {"top_p": 0.95}, {"top_k": 20, "top_p": 0.9}, {"min_p": 0.01}, {"top_k": 5000}]
    logits_SV = torch.randn(len(params), 50_000).mul(2.5).bfloat16()
    expected = sample_by_reference(logits_SV, seqs(params))
    assert sample(logits_SV.clone(), seqs(params)) == sample_as_on_a_gpu(logits_SV, seqs(params)) == expected


@pytest.mark.parametrize("kind", ["plain", "few distinct values", "all equal", "mostly forbidden"])
def test_candidates_of_gpus(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few of them, so that settings keep more than there are, or end among equal ones."""
    monkeypatch.setattr("pdserve.kernels.gpu.draw.CANDIDATES", 16)
    params: list[dict[str, Any]] = [{"top_k": k} for k in (1, 15, 16, 17, 300)]
    params += [{"top_p": p} for p in (0.1, 0.9, 0.999)] + [{"top_k": 40, "top_p": 0.3}, {"min_p": 0.1}, {"min_p": 1e-9}]
    for seed in range(20):
        logits_SV = KINDS[kind](torch.randn(len(params), 100, generator=torch.Generator().manual_seed(seed)))
        rows = seqs(params, 1000 * seed)
        assert sample_as_on_a_gpu(logits_SV, rows) == sample_by_reference(logits_SV, rows)


@pytest.mark.parametrize("draw", [draw, gpu_draw])
@pytest.mark.parametrize("filters", [(0, 1, 0), (20, 1, 0), (0, 0.9, 0), (0, 1, 0.02), (50, 0.9, 0.01)], ids=str)
def test_reference_is_rarely_needed(filters: tuple[int, float, float], draw: Callable[..., torch.Tensor]) -> None:
    assert CANDIDATES > 500
    torch.manual_seed(0)
    rows, logits_SV = list(range(2000)), torch.randn(2000, 500)
    drawn_R = draw(logits_SV, elementwise.argmax(logits_SV), rows, rows, [(1.0, *filters)] * 2000)
    assert (drawn_R < 0).sum() < 20 and len(set(drawn_R.tolist())) > 5


@pytest.mark.parametrize("draw", [draw, gpu_draw])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "NaN" in kind or "infinity" in kind or "all forb" in kind])
def test_rows_with_non_finite_logits_are_left_to_the_reference(kind: str, draw: Callable[..., torch.Tensor]) -> None:
    logits_SV = KINDS[kind](torch.linspace(-2, 2, 100).repeat(3, 1))
    logits_SV[0] = torch.linspace(-1, 1, 100)
    argmax_S = elementwise.argmax(logits_SV)
    drawn = draw(logits_SV, argmax_S, [2, 0], [1, 2], [(1.0, 0, 1, 0)] * 2).tolist()
    assert drawn[2] == -1 and drawn[0] >= 0 and drawn[1] == argmax_S[1], "the row that is not sampled keeps its own"
