"""Reports of a job: stamps, transfer totals, tokens, and remaining load."""

from typing import Any

from pdserve.engine.sequence import Sequence
from pdserve.engine.step import Accepted
from pdserve.keys import Layout, token_array
from pdserve.kv_transfer.connector import Outcome, Result
from pdserve.lifetime import Stage
from pdserve.output import Moved
from pdserve.proto import pdserve_pb2 as pb
from pdserve.request import SamplingParams
from pdserve.roles.job import BATCHED_TOKENS, Job
from pdserve.router.instances.frame_checks import times_fault

PROMPT = [1, 2, 3]
FORMAT: dict[str, Any] = {"model_fingerprint": "", "num_layers": 1, "num_kv_heads": 1, "dtype": "uint8", "itemsize": 1}
LAYOUT = Layout(head_dim=4, block_size=1, **FORMAT)  # 8 bytes


def new_job(phase: "pb.Phase" = pb.BOTH, *, whole: bool = False) -> Job:
    seq = Sequence.new("r", token_array(PROMPT), len(PROMPT), len(PROMPT), SamplingParams(max_tokens=100), b"", 16)
    return Job("router", seq, phase, whole=whole)


def test_only_the_first_stamp_of_a_stage_counts() -> None:
    job = new_job()
    job.stamp(Stage.FIRST_TOKEN, 1.0)
    job.stamp(Stage.FIRST_TOKEN, 2.0)
    assert job.pending_output().stamps == {"first_token": 1.0}


def test_time_shared_by_transfers_counts_once() -> None:
    job = new_job()
    job.record_transfer(Result([Outcome.OK, Outcome.MISSING], 2.0), now=10.0)
    job.record_transfer(Result([Outcome.OK], 2.0), now=11.0)  # overlaps the first for one second
    job.report_transfers(LAYOUT)
    assert job.pending_output().moved == Moved(blocks=2, bytes=16, seconds=3.0)


def test_transfers_that_take_no_time_are_reported_as_routers_accept_them() -> None:
    job = new_job()
    job.record_transfer(Result([Outcome.OK], 3e-10), now=10.0)
    job.report_transfers(LAYOUT)
    assert job.output is not None and times_fault(job.output) == ""


def test_tokens_of_a_whole_answer_are_sent_in_batches() -> None:
    job, urgent_after = new_job(whole=True), []
    for number in range(1, BATCHED_TOKENS + 2):
        job.seq.output.tokens.append(7)
        job.report_tokens(Accepted(1, [7]), 0.0)
        if job.urgent:
            urgent_after.append(number)
            job.output, job.urgent = None, False
    assert urgent_after == [1, BATCHED_TOKENS + 1]


def test_remaining_load_of_each_phase() -> None:
    prefill, both, decode = (new_job(phase).remaining_load() for phase in (pb.PREFILL, pb.BOTH, pb.DECODE))
    assert (prefill.prefills, prefill.prefill_tokens, prefill.output_tokens) == (1, 3, 0)
    assert (both.prefills, both.prefill_tokens, both.output_tokens, both.context_tokens) == (1, 3, 100, 3)
    assert (decode.prefills, decode.prefill_tokens, decode.output_tokens) == (0, 0, 100), "it waits for KV"
