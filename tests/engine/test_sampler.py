"""Sampler: distribution, reproducibility, filters, penalties and logprobs."""

import math
from typing import Any

import pytest
import torch
from transformers import NoBadWordsLogitsProcessor

from pdserve.beam_search import BeamSearch
from pdserve.engine.features import PromptScores, features_of, find, model_logprobs, record_candidates, token_logprobs
from pdserve.engine.sampler import gumbel_noise, rng_counter, sample
from pdserve.engine.sequence import Sequence
from pdserve.keys import token_array
from pdserve.request import SamplingParams

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, 3.0, -50.0, 1.5])


def seq(seed: int = 0, outputs: int = 0, stops: frozenset[int] = frozenset(), **kwargs: Any) -> Sequence:
    sampling = SamplingParams(**{"temperature": 1.0, "max_tokens": 99, "seed": seed, **kwargs})
    tokens, features = token_array([0] * (1 + outputs)), features_of(sampling, 1)
    return Sequence.new("r", tokens, 1, 1, sampling, b"", 16, stop_token_ids=stops, features=features)


def draw(count: int, **kwargs: Any) -> torch.Tensor:
    """Return the relative frequencies of `count` samples, each with its own seed."""
    tokens = sample(LOGITS.repeat(count, 1), [seq(seed=i, **kwargs) for i in range(count)])
    return torch.bincount(torch.tensor(tokens), minlength=len(LOGITS)) / count


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    expected = torch.softmax(LOGITS / temperature, dim=0)
    error = (draw(20_000, temperature=temperature) - expected).abs().max()
    assert error < 0.015  # four standard deviations of the most frequent token


def test_positions_are_independent_draws() -> None:
    tokens = sample(LOGITS.repeat(20_000, 1), [seq(seed=i // 1000, outputs=i % 1000) for i in range(20_000)])
    shares = torch.bincount(torch.tensor(tokens), minlength=len(LOGITS)) / 20_000
    assert (shares - torch.softmax(LOGITS, 0)).abs().max() < 0.015


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"top_k": 1}, {5}),
        ({"top_k": 3}, {5, 0, 7}),
        ({"top_p": 0.5}, {5}),  # its share is 0.52
        ({"top_p": 0.6}, {5, 0}),
        ({"min_p": 0.3}, {5, 0}),
        ({"min_p": 0.2, "top_k": 5, "top_p": 0.9}, {5, 0, 7}),
        ({"temperature": 1e-6}, {5}),
        ({"temperature": 0.0}, {5}),
    ],
)
def test_filters(settings: dict[str, float], kept: set[int]) -> None:
    shares = draw(3000, **settings)
    assert {int(i) for i in shares.nonzero()} == kept
    if len(kept) > 1 and "temperature" not in settings:
        expected = torch.softmax(LOGITS[sorted(kept)], dim=0)
        assert (shares[sorted(kept)] - expected).abs().max() < 0.04


def test_sample_does_not_depend_on_the_batch() -> None:
    rows = torch.randn(9, 300)
    seqs = [seq(seed=i, outputs=i % 4, top_k=40 * (i % 2), top_p=1.0 - 0.1 * (i % 3)) for i in range(9)]
    together = sample(rows.clone(), seqs)
    assert [sample(rows[i : i + 1].clone(), [seqs[i]])[0] for i in range(9)] == together


def test_rounding_noise_does_not_change_tokens() -> None:
    """Batch shapes change the last bits of a logit. None of 20,000 samples may differ."""
    torch.manual_seed(0)
    rows = torch.randn(20_000, 260) * 3
    seqs = [seq(seed=i) for i in range(20_000)]
    noisy = rows * (1 + 1e-7 * torch.randn_like(rows))
    assert sample(rows, seqs) == sample(noisy, seqs)


def test_no_stop_before_min_tokens() -> None:
    stops = frozenset({5})
    assert sample(LOGITS[None].clone(), [seq(temperature=0.0, min_tokens=2, outputs=1, stops=stops)]) == [0]
    assert sample(LOGITS[None].clone(), [seq(temperature=0.0, min_tokens=2, outputs=2, stops=stops)]) == [5]


def test_noise_is_pinned() -> None:
    """A seed must give the same tokens on any instance and in any version."""
    assert rng_counter(1, 2) == 6575807232144248487
    first = (0xE220A8397B1DCDAF >> 11) + 0.5  # SplitMix64's published first output for seed 0
    noise = gumbel_noise(torch.tensor([0, -1]), 3).tolist()
    assert noise[0] == pytest.approx([-math.log(-math.log(first * 2**-53)), 0.17385007634518, -1.29008981781333])
    assert noise[1] == pytest.approx([2.18824483552619, 2.39184618365557, -0.41639530424226])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_first_of_equal_logits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits_SV = torch.randint(-3, 3, (64, 1000)).to(dtype)
    seqs = [seq(temperature=0.0) for _ in range(64)]
    assert sample(logits_SV.clone(), seqs) == logits_SV.argmax(dim=-1).tolist()
    assert sample(logits_SV.clone(), seqs) == [row.index(max(row)) for row in logits_SV.tolist()]


def test_logprobs_are_those_of_the_model() -> None:
    rows = LOGITS.repeat(3, 1).bfloat16()
    seqs = [seq(logprobs=2, logit_bias={6: 100.0}, temperature=0.0), seq(), seq(logprobs=0, temperature=0.3)]
    raw = model_logprobs(rows, [0, 2])
    tokens = sample(rows, seqs)
    first, last = token_logprobs(raw, [seqs[0], seqs[2]], [tokens[0], tokens[2]])
    expected = torch.log_softmax(LOGITS.bfloat16().double(), dim=0)
    assert tokens[0] == 6
    assert first.logprob == pytest.approx(float(expected[6]), abs=1e-5)
    assert [token for token, _ in first.top] == [5, 0]
    assert [logprob for _, logprob in first.top] == pytest.approx(expected[[5, 0]].tolist())
    assert last.logprob == pytest.approx(float(expected[tokens[2]]), abs=1e-5) and last.top == ()


@pytest.mark.parametrize("vocab", [512, 4096])
def test_reported_tokens_do_not_depend_on_other_rows(vocab: int) -> None:
    """Logits in 16 bits tie, and another row may ask for more of the most likely tokens."""
    torch.manual_seed(0)
    logits_SV = (torch.randn(40, vocab) * 2.5).bfloat16()
    for row in logits_SV:
        reported = []
        for others in ([], [seq(outputs=1, logprobs=20, prompt_logprobs=20, beam_width=32)]):
            one = seq(outputs=1, logprobs=5, prompt_logprobs=5, beam_width=2)
            rows_SV = row.repeat(1 + len(others), 1)
            for each in (one, *others):
                each.search(BeamSearch(each.sampling.beam_width, frozenset(), 9, 1.0, True))
            of_rows = model_logprobs(rows_SV, [*range(len(rows_SV))])
            logprobs, *_ = token_logprobs(of_rows, [one, *others], [3] * len(rows_SV))
            scores = find(PromptScores, one)
            assert scores is not None and one.group is not None
            scores.take_logits(one, rows_SV[:1])
            record_candidates(rows_SV, [one, *others])
            reported.append((logprobs, scores.scores, one.group.candidates[one]))
        assert reported[0] == reported[1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bias_changes_its_own_row_only(temperature: float) -> None:
    biased, plain = seq(temperature=temperature, logit_bias={6: 100.0, 5: -100.0}), seq(temperature=temperature)
    assert sample(LOGITS.repeat(2, 1), [biased, plain]) == [6, sample(LOGITS[None].clone(), [plain])[0]]


def test_bias_shifts_the_distribution() -> None:
    expected = torch.softmax(LOGITS + torch.tensor([0, 2.0, 0, 0, 0, 0, 0, 0]), dim=0)
    assert (draw(20_000, logit_bias={1: 2.0}) - expected).abs().max() < 0.015


def test_penalties_count_existing_tokens() -> None:
    """Against the formulas of OpenAI (output only) and of transformers (prompt and output)."""
    one = seq(temperature=0.0, frequency_penalty=0.5, presence_penalty=0.25, repetition_penalty=2.0)
    one.output.tokens, one.output.num_prompt = token_array([3, 0, 6, 5, 5, 1, 5]), 3
    expected = LOGITS.clone()
    seen = torch.tensor([0, 1, 3, 5, 6])
    expected[seen] = torch.where(expected[seen] > 0, expected[seen] / 2, expected[seen] * 2)
    expected[5] -= 3 * 0.5 + 0.25
    expected[1] -= 0.5 + 0.25
    rows = LOGITS.repeat(2, 1)
    assert sample(rows, [one, seq(temperature=0.0)]) == [int(expected.argmax()), 5]
    assert rows[0].tolist() == pytest.approx(expected.tolist())
    assert rows[1].tolist() == LOGITS.tolist()


def test_only_allowed_tokens_are_drawn() -> None:
    shares = draw(3000, allowed_token_ids=(0, 4, 6))
    assert {int(i) for i in shares.nonzero()} <= {0, 4, 6}
    expected = torch.softmax(LOGITS[[0, 4, 6]], dim=0)
    assert (shares[[0, 4, 6]] - expected).abs().max() < 0.04
    assert sample(LOGITS[None].clone(), [seq(temperature=0.0, allowed_token_ids=(2, 6))]) == [2]


WORDS = ((5,), (0, 7), (7, 7, 7), (3, 0, 1))


@pytest.mark.parametrize("output", [[], [0], [1, 0], [7], [7, 7], [3, 0], [5, 7, 7], [0, 3]])
def test_bad_words_are_masked_as_in_transformers(output: list[int]) -> None:
    sampling = SamplingParams(temperature=0.0, bad_words=WORDS)
    tokens = token_array([0, 7, 3, *output])
    ours = Sequence.new("r", tokens, 3, 3, sampling, b"", 16, features=features_of(sampling, 3))
    theirs = NoBadWordsLogitsProcessor([list(word) for word in WORDS], eos_token_id=[99])
    scores = LOGITS[None].clone()
    if output:  # transformers looks at the prompt, too
        scores = theirs(torch.tensor([output]), scores)
    else:
        scores[0, 5] = float("-inf")
    masked = LOGITS[None].clone()
    assert sample(masked, [ours]) == [int(scores.argmax())]
    assert torch.equal(masked, scores)


def test_a_bad_word_is_drawn_if_no_other_token_is_allowed() -> None:
    settings: dict[str, Any] = {"temperature": 0.0, "allowed_token_ids": (5, 7), "bad_words": ((5,), (7,))}
    assert sample(LOGITS[None].clone(), [seq(**settings)]) == [5]
