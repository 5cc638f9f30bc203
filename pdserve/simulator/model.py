"""What a simulation must know of an instance and its machine: durations and sizes, from a profile."""

from collections.abc import Callable
from dataclasses import dataclass

from pdserve.costs import Work
from pdserve.keys import Layout
from pdserve.simulator.store import Link


@dataclass(frozen=True)
class InstanceModel:
    """One kind of instance.

    Attributes:
        layout: of its KV blocks.
        num_blocks: in its pool.
        max_model_len: tokens of the longest request.
        step_seconds: duration of a step, by the (tokens to compute, tokens before them) of each sequence. It includes the
            Python of the engine thread.
        decode_seconds: the same of a step in which every sequence decodes, by their number and the sum of their contexts.
        swap_seconds: duration of copying a number of blocks to host memory, or back.
        link: to the KV store.
        frame_latency_s: of a frame between router and instance, in either direction.
        router_request_s: time of the router's thread for a request, until it is submitted.
        router_token_s: time of the router's thread for a token.
        start_up_s: from the start of a process to its first request.
    """

    layout: Layout
    num_blocks: int
    max_model_len: int
    step_seconds: Callable[[Work], float]
    decode_seconds: Callable[[int, int], float]
    swap_seconds: Callable[[float], float]
    link: Link
    frame_latency_s: float = 2e-4
    router_request_s: float = 0.0
    router_token_s: float = 0.0
    start_up_s: float = 0.0
