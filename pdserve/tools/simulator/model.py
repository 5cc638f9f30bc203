"""Model of an instance and its machine for simulations: durations and sizes, from a profile."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from pdserve.costs import Work
from pdserve.engine.memory.groups import blocks_in
from pdserve.engine.memory.kv_memory import pool_groups
from pdserve.engine.paced_runner import paced_layout, pool_pages
from pdserve.keys import Layout
from pdserve.profile.profile import AdapterModel, DraftFacts, Profile
from pdserve.tools.simulator.store import Link

FOLLOWING_SCHEMES = ("shm",)  # whose blocks can be loaded while later ones are still being stored


@dataclass(frozen=True)
class InstanceModel:
    """One kind of instance.

    Attributes:
        layout: of its KV blocks.
        num_blocks: of each group that one sequence can have in its pool.
        max_model_len: tokens of the longest request.
        step_seconds: duration of a step, by the (tokens to compute, tokens before them) of each sequence. It includes the
            Python of the engine thread.
        decode_seconds: the same of a step in which every sequence decodes, by their number and the sum of their contexts.
        swap_seconds: duration of copying a number of blocks to host memory, or back.
        link: to the KV store.
        frame_latency_s: of a frame between router and instance, in either direction.
        client_s: the way between client and router, of a request and its first token together.
        router_request_s: time of the router's thread for a request, until it is submitted.
        router_prompt_token_s: the same for each token of its prompt.
        router_token_s: time of the router's thread for a token.
        start_up_s: from the start of an instance until it is ready.
        num_pages: in its pool; 0: as many as `num_blocks` take, see `pages_for`.
        window: of all layers, if there is one.
        acceptance: shares of right drafts by API key, as `parse_acceptance` returns them; empty: it does not speculate.
        draft: the model that drafts; None: drafts are found without one.
        adapters: names of those that it has.
        adapter_model: what they add to steps.
    """

    layout: Layout
    num_blocks: int
    max_model_len: int
    step_seconds: Callable[[Work], float]
    decode_seconds: Callable[[int, int], float]
    swap_seconds: Callable[[float], float]
    link: Link
    frame_latency_s: float = 2e-4
    client_s: float = 0.0
    router_request_s: float = 0.0
    router_prompt_token_s: float = 0.0
    router_token_s: float = 0.0
    start_up_s: float = 10.0
    num_pages: int = 0
    window: int | None = None
    acceptance: Mapping[str, float] = field(default_factory=dict)
    draft: DraftFacts | None = None
    adapters: tuple[str, ...] = ()
    adapter_model: AdapterModel = field(default_factory=AdapterModel)

    @classmethod
    def from_profile(
        cls, profile: Profile, scheme: str, *, num_blocks: int | None = None, block_size: int | None = None
    ) -> "InstanceModel":
        """Return the model of an instance of a profile.

        Args:
            scheme: of the connector.
            num_blocks: of `block_size` tokens in the pool; default: as many tokens as when it was measured.
            block_size: tokens per block; default: as when it was measured.

        Raises:
            ValueError: the profile does not tell how many blocks there are.
        """
        engine, step, overheads = profile.engine, profile.step, profile.overheads
        size = block_size or engine.block_size
        layout = paced_layout(profile, size)
        num_pages = 0 if num_blocks else pool_pages(profile, layout)
        num_blocks = num_blocks or blocks_in(num_pages, pool_groups(layout, 0))
        if num_blocks < 2:
            raise ValueError(f"the profile says {engine.num_blocks} blocks; give --num-blocks")
        fixed_s, sequence_s = overheads.engine_step_s, overheads.engine_sequence_s
        swap_a, swap_b = profile.swap
        ratio = size / engine.block_size  # of a block to the one that was measured
        transfer, draft = profile.transfer(scheme), profile.draft
        return cls(
            layout=layout,
            num_blocks=num_blocks,
            num_pages=num_pages,
            window=engine.window,
            max_model_len=min(engine.max_model_len or num_blocks * size, num_blocks * size),
            step_seconds=lambda work: step.seconds(work) + fixed_s + sequence_s * len(work),
            decode_seconds=lambda count, context: step.decode_seconds(count, context) + fixed_s + sequence_s * count,
            swap_seconds=lambda blocks: swap_a + swap_b * ratio * blocks,
            link=Link(
                latency_s=transfer.latency_s,
                bytes_per_s=transfer.bytes_per_s,
                total_bytes_per_s=transfer.link_bytes_per_s,
                store_latency_s=transfer.store_latency_s,
                store_bytes_per_s=transfer.store_bytes_per_s,
                follows=scheme in FOLLOWING_SCHEMES,
            ),
            frame_latency_s=overheads.frame_s,
            client_s=overheads.client_s,
            router_request_s=overheads.router_request_s,
            router_prompt_token_s=overheads.router_prompt_token_s,
            router_token_s=overheads.router_token_s,
            start_up_s=profile.start_up_s,
            draft=draft and replace(draft, num_blocks=max(1, draft.num_blocks * num_blocks // engine.num_blocks)),
            adapter_model=profile.adapters or AdapterModel.assumed(step),
        )
