"""`pdserve bench latency` and `throughput`: what they send, and vLLM's lines and figures of it."""

from collections.abc import Callable, Sequence

import pytest

from pdserve.tools.load_config import BenchLatencyConfig, BenchThroughputConfig
from pdserve.tools.offline_bench import latency, throughput

Sent = list[tuple[Sequence[list[int]], int]]


def clock(*seconds: float) -> tuple[Sent, Callable[[Sequence[list[int]], int], None], Callable[[], float]]:
    """Return what is sent, a generate that takes these seconds in turn, and the clock that it moves."""
    sent, time, left = Sent(), [0.0], list(seconds)

    def generate(prompts: Sequence[list[int]], tokens: int) -> None:
        sent.append((prompts, tokens))
        time[0] += left.pop(0)

    return sent, generate, lambda: time[0]


def test_latency_is_of_the_batches_that_count() -> None:
    sent, generate, now = clock(9.0, 1.0, 2.0, 3.0)
    config = BenchLatencyConfig(batch_size=2, input_len=5, output_len=10, num_iters_warmup=1, num_iters=3)
    lines, figures = latency(config, generate, now)
    assert figures["latencies"] == [1.0, 2.0, 3.0] and figures["avg_latency"] == 2.0
    assert figures["percentiles"]["50"] == 2.0 and lines[0] == "Avg latency: 2.0 seconds"
    assert (
        "50% percentile latency: 2.0 seconds" in lines and lines[-1] == "Normalized latency: 200.00 ms per output token"
    )
    prompts = [tuple(one) for batch, tokens in sent for one in batch if tokens == 10]
    assert [len(one) for one in prompts] == [5] * 8 and len(set(prompts)) == 8, "a cached prompt would cost nothing"


def test_throughput_is_of_all_prompts_at_once() -> None:
    sent, generate, now = clock(5.0, 4.0)
    config = BenchThroughputConfig(num_prompts=20, input_len=30, output_len=10, n=2)
    (line,), figures = throughput(config, generate, now)
    assert line == "Throughput: 5.00 requests/s, 250.00 total tokens/s, 100.00 output tokens/s"
    assert figures["elapsed_time"] == 4.0 and figures["total_num_tokens"] == 1000
    assert [len(prompts) for prompts, _ in sent] == [1, 20]


def test_a_deployment_of_one_instance_is_measured_by_default() -> None:
    config = BenchLatencyConfig()
    assert (config.prefill, config.decode, config.both) == (0, 0, 1)
    with pytest.raises(ValueError, match="--batch-size"):
        BenchLatencyConfig(batch_size=0)
