"""States of recurrent layers: equal to float64 within rounding, and to the bit however tokens are divided into steps."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate

import pytest
import torch

from pdserve.kernels import cpu, states
from pdserve.kernels.batch import PagedBatch
from pdserve.kernels.states import StateRows

pytestmark = pytest.mark.usefixtures("cpu_kernel")
B, LAYER, OFFSET = 16, 3, 5
LENGTHS = (100, 33, 1)
# Of a sequence of 100 tokens, states are kept behind 32 and 64 only; of 33 tokens, behind 16, 32 and 33.
TABLES = torch.tensor([[-1, 7, -1, 2, -1, -1, 5], [1, 4, 6, 0, 0, 0, 0], [3, 0, 0, 0, 0, 0, 0]])
Run = Callable[[PagedBatch, torch.Tensor], torch.Tensor]  # computes the given rows of all sequences' tokens


@dataclass(frozen=True)
class Layer:
    """A random layer over the tokens of all sequences, one after the other.

    Attributes:
        kind, size: of its states.
        run: computes the given tokens.
        expected: results and last states in float64, of each sequence.
    """

    kind: str
    size: int
    run: Run
    expected: list[tuple[torch.Tensor, torch.Tensor]]


def parts(x: torch.Tensor) -> list[torch.Tensor]:
    """Return what belongs to each sequence."""
    return [*x.double().split(LENGTHS)]


def convolution(taps: int, *, has_bias: bool) -> Layer:
    channels = 37
    x_TC, weight_CK = torch.randn(sum(LENGTHS), channels), torch.randn(channels, taps)
    bias_C = torch.randn(channels) if has_bias else None
    expected = []
    for x in parts(x_TC):
        padded = torch.nn.functional.pad(x.T, (taps - 1, 0))
        y = torch.nn.functional.conv1d(padded[None], weight_CK.double()[:, None], groups=channels)[0].T
        expected.append((y if bias_C is None else y + bias_C.double(), padded[:, len(x) :]))
    return Layer(
        "convolution",
        channels * (taps - 1),
        lambda batch, rows: states.convolve(x_TC[rows], weight_CK, bias_C, batch, LAYER),
        expected,
    )


def attention(decays: str, *, delta: bool) -> Layer:
    heads, groups, keys, values, tokens = (1, 1, 8, 37, sum(LENGTHS)) if decays == "each" else (4, 2, 24, 40, 134)
    shape = {"head": (heads,), "key": (heads, keys), "each": (heads, keys, values)}[decays]
    decay = torch.rand(tokens, *shape)
    q_TGK, k_TGK = (torch.nn.functional.normalize(torch.randn(tokens, groups, keys), dim=-1) for _ in range(2))
    v_THV, beta_TH = torch.randn(tokens, heads, values), torch.rand(tokens, heads) if delta else None
    expected = []
    of_tokens = decay.reshape(tokens, heads, -1, values if decays == "each" else 1)
    betas = parts(torch.ones(tokens, heads) if beta_TH is None else beta_TH)
    for q, k, v, a, beta in zip(*map(parts, (q_TGK, k_TGK, v_THV, of_tokens)), betas, strict=True):
        state, rows = torch.zeros(heads, keys, values, dtype=torch.double), []
        for t in range(len(q)):
            key, query = (x[t].repeat_interleave(heads // groups, 0)[..., None] for x in (k, q))
            state = a[t] * state
            new = beta[t][:, None] * (v[t] - (state * key).sum(1) * delta)
            state = state + key * new[:, None]
            rows.append((state * query).sum(1))
        expected.append((torch.stack(rows), state))
    return Layer(
        "recurrence",
        heads * keys * values,
        lambda batch, rows: states.linear_attention(
            q_TGK[rows], k_TGK[rows], v_THV[rows], decay[rows], None if beta_TH is None else beta_TH[rows], batch, LAYER
        ),
        expected,
    )


LAYERS: dict[str, Callable[[], Layer]] = {
    "short convolution": lambda: convolution(3, has_bias=False),
    "convolution with bias": lambda: convolution(4, has_bias=True),
    "gated delta rule": lambda: attention("head", delta=True),
    "Kimi's": lambda: attention("key", delta=True),
    "Mamba-2": lambda: attention("head", delta=False),
    "Mamba": lambda: attention("each", delta=False),
}


def compute(layer: Layer, steps: list[list[int]], threads: int = 1) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Compute so many tokens of each sequence in each step. Return the results by sequence, and all rows of states."""
    memory = state_rows(layer)
    first, done, results = [0, *accumulate(LENGTHS)], [0] * len(LENGTHS), [list[torch.Tensor]() for _ in LENGTHS]
    torch.set_num_threads(threads)
    for step in steps:
        seqs = [i for i, count in enumerate(step) if count]
        counts = [step[i] for i in seqs]
        rows = torch.cat([torch.arange(first[i] + done[i], first[i] + done[i] + step[i]) for i in seqs])
        y = layer.run(batch_of(memory, seqs, counts, [done[i] + step[i] for i in seqs]), rows)
        for i, part in zip(seqs, y.split(counts), strict=True):
            results[i].append(part)
            done[i] += step[i]
    assert done == [*LENGTHS]
    return [torch.cat(each) for each in results], memory.rows_NX


def state_rows(layer: Layer) -> StateRows:
    rows_NX = torch.full((8, OFFSET + layer.size + 3), float("nan"))
    return StateRows(rows_NX, {(LAYER, layer.kind): OFFSET, (LAYER, "another"): 0})


def batch_of(memory: StateRows, seqs: list[int], counts: list[int], kv_lens: list[int]) -> PagedBatch:
    """Return a batch of sequences by their numbers of new tokens and of all tokens."""
    batch = PagedBatch(
        caches=[torch.zeros(1, 2, 1, B, 8)],
        slots_T=torch.zeros(sum(counts), dtype=torch.long),
        tables_SM=TABLES[seqs],
        query_lens=counts,
        kv_lens=kv_lens,
        kv_lens_S=torch.tensor(kv_lens),
        starts=torch.tensor([0, *accumulate(counts)]),
        kernel=cpu,
        states=memory,
    )
    return replace(batch, tails=(batch,))


def chunks(size: int) -> list[list[int]]:
    """Return steps in which each sequence goes on by so many tokens."""
    return [[max(0, min(size, length - at)) for length in LENGTHS] for at in range(0, max(LENGTHS), size)]


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest) -> None:
    before = torch.get_num_threads()
    request.addfinalizer(lambda: torch.set_num_threads(before))


@pytest.mark.parametrize("name", LAYERS)
def test_states(name: str) -> None:
    torch.manual_seed(0)
    layer = LAYERS[name]()
    results, rows_NX = compute(layer, chunks(100))
    for i, (y, state) in enumerate(layer.expected):
        torch.testing.assert_close(results[i].double(), y, rtol=1e-5, atol=1e-5)
        row = TABLES[i, (LENGTHS[i] - 1) // B]
        kept = rows_NX[row, OFFSET : OFFSET + layer.size].view(state.shape).double()
        torch.testing.assert_close(kept, state, rtol=1e-5, atol=1e-5)
    assert rows_NX[:, :OFFSET].isnan().all() and rows_NX[:, OFFSET + layer.size :].isnan().all()
    others = {
        "token by token": (chunks(1), 1),
        "by 16": (chunks(16), 2),
        "by 63": (chunks(63), 3),
        "by 64": (chunks(64), 2),
        "one after the other": ([[100, 0, 0], [0, 33, 0], [0, 0, 1]], 1),
    }
    for way, (steps, num_threads) in others.items():
        again, rows_again = compute(layer, steps, num_threads)
        assert all(map(torch.equal, again, results)), way
        assert torch.equal(rows_again.nan_to_num(), rows_NX.nan_to_num()), way


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("num_accepted", range(4))
@pytest.mark.parametrize("num_before", [12, 14, 29])
def test_drafts(name: str, num_accepted: int, num_before: int) -> None:
    """Behind drafts, some of which are wrong, states are those of the tokens; beside another sequence, which has none."""
    torch.manual_seed(0)
    layer, first, num_drafts, others = LAYERS[name](), LENGTHS[0], 3, (6, 12)
    stop = num_before + 1 + num_accepted
    memory, plain = state_rows(layer), state_rows(layer)
    rows = torch.cat([torch.arange(stop), torch.arange(first, first + sum(others))])
    expected = layer.run(batch_of(plain, [0, 1], [stop, sum(others)], [stop, sum(others)]), rows)

    before = torch.cat([torch.arange(num_before), torch.arange(first, first + others[0])])
    layer.run(batch_of(memory, [0, 1], [num_before, others[0]], [num_before, others[0]]), before)
    lengths = [num_before + 1 + ahead for ahead in range(num_drafts + 1)]
    wrong = [70 + i for i in range(num_drafts - num_accepted)]
    drafted = torch.tensor([*range(num_before, stop), *wrong, *range(first + others[0], first + sum(others))])
    batch = batch_of(memory, [0] * 4 + [1], [1] * 4 + [others[1]], [*lengths, sum(others)])
    batch = states.with_drafts(batch, [num_drafts, 0, 0, 0, 0])
    y = layer.run(batch, drafted)
    right = torch.cat([y[: 1 + num_accepted], y[num_drafts + 1 :]])
    assert torch.equal(right, torch.cat([expected[num_before:stop], expected[stop + others[0] :]]))
    states.keep_accepted(batch, [num_accepted, 0, 0, 0, 0])
    for i, length in ((0, stop), (1, sum(others))):
        row = next(row for row in TABLES[i, (length - 1) // B :] if row >= 0)
        assert torch.equal(memory.rows_NX[row].nan_to_num(), plain.rows_NX[row].nan_to_num())
