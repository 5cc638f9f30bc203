"""Mock instances that answer at once, for router benchmarks: the real control plane without an engine.

    python benchmarks/mock_instance.py STEP_MS ROUTER[,ROUTER…] NAME…     a NAME begins with the role: decode-0

An engine step gives each sequence one token, and one frame carries the tokens of all sequences. Steps begin at least STEP_MS
apart and take no time; at 0, a sequence finishes before the next one arrives, and a frame carries one token. Tokens of a
whole (non-streaming) answer go together, except for the first. A prefill has stored all KV when it has the first token.
Nothing is hashed, so requests cause no KV events. Heartbeats have as many series as those of a real instance over `shm://`.
"""

import asyncio
import secrets
import sys
import time
from dataclasses import dataclass
from typing import cast

import uvloop

from pdserve.control.frame_connection import NONCE_BYTES, PROTOCOL_VERSION
from pdserve.counters import HELP, LABELS, series
from pdserve.instance.instance import Instance
from pdserve.instance.kv_events import KVEventPublisher
from pdserve.instance.router_link import RouterLinks
from pdserve.keys import Layout
from pdserve.lifetime import Stage
from pdserve.output import Output, Sources, Stored, pack
from pdserve.proto import pdserve_pb2 as pb
from pdserve.request import Request
from pdserve.roles.job import BATCHED_TOKENS

CONTEXT = 16384  # tokens
BLOCK_SIZE = 16
TOKEN = 100  # the only token of every answer
COSTS = pb.Costs(prefill=(5e-3, 4e-5, 1e-8), decode=(8e-3, 2e-4, 1e-8), transfer=(1e-3, 2e-10))
COUNTERS = [
    *(series("prompt_tokens_by_source", source=source) for source in ("computed", "local_hit", "loaded", "unneeded")),
    *(name for name in HELP if name not in LABELS),
    *(
        series(f"kv_transfer_{unit}", connector="mock", direction=direction)
        for unit in ("bytes", "seconds", "blocks")
        for direction in ("store", "load")
    ),
]


def hello(name: str, role: str, model: str) -> pb.Hello:
    """Return the hello frame of an instance of the demo model, with a longer context and a large pool."""
    layout = pb.Layout(
        model_fingerprint="mock",
        num_layers=1,
        num_kv_heads=1,
        head_dim=64,
        block_size=BLOCK_SIZE,
        dtype="float32",
        itemsize=4,
        version=1,
    )
    return pb.Hello(
        instance_id=name,
        role=role,
        model=model,
        namespace=Layout.from_message(layout).namespace,
        epoch=time.monotonic_ns(),
        nonce=secrets.token_bytes(NONCE_BYTES),
        block_size=BLOCK_SIZE,
        num_blocks=1 << 20,
        block_bytes=1 << 13,
        max_model_len=CONTEXT,
        vocab_size=2048,
        connector="mock",
        protocol_version=PROTOCOL_VERSION,
        layout=layout,
    )


@dataclass
class Answer:
    left: int  # tokens
    whole: bool  # send all tokens together
    begun: bool = False
    kept: int = 0  # tokens generated but not sent

    def step(self) -> int:
        """Generate a token, and return the number of tokens ready to send."""
        self.left -= 1
        self.kept += 1
        if self.whole and self.begun and self.left and self.kept < BATCHED_TOKENS:
            return 0
        told, self.kept, self.begun = self.kept, 0, True
        return told


class MockInstance:
    """A mock with the interface used by `RouterLinks`. Its requests are known by the router link and their id.

    Attributes:
        num_heartbeats: number of heartbeats sent, to all routers.
    """

    def __init__(self, step_s: float) -> None:
        self.kv_events = KVEventPublisher()
        self.reporter = self
        self.num_heartbeats = 0
        self._step_s = step_s
        self._reserved: dict[tuple[str, str], Answer] = {}  # until prefill has the first token
        self._running: dict[tuple[str, str], Answer] = {}
        self._outputs: dict[str, list[Output]] = {}  # by link; they go into its next frame
        self._awake = asyncio.Event()
        self._steps = 0

    async def serve(self, routers: list[str], hello: pb.Hello) -> None:
        """Serve all routers forever."""
        links = RouterLinks(routers)
        async with asyncio.TaskGroup() as group:
            group.create_task(links.run(cast(Instance, self), hello))
            group.create_task(self._run(links))

    @property
    def heartbeat(self) -> pb.Heartbeat:
        self.num_heartbeats += 1
        counters = dict.fromkeys(COUNTERS, 12345.0) | {"engine_steps": self._steps}
        return pb.Heartbeat(counters=counters, costs=COSTS, running=len(self._running), free_blocks=1000)

    def other_load(self, link: str) -> pb.Load:
        """Return the remaining tokens of the requests of all routers except one."""
        left = [answer.left for (other, _), answer in self._running.items() if other != link]
        return pb.Load(requests=len(left), output_tokens=sum(left))

    def drop_link(self, link: str) -> None:
        self._reserved = {key: answer for key, answer in self._reserved.items() if key[0] != link}
        self._running = {key: answer for key, answer in self._running.items() if key[0] != link}
        self._outputs.pop(link, None)

    def hand_over(self, link: str, message: pb.HandOver) -> None:
        key = link, message.request_id
        if message.HasField("first_token") and key in self._reserved:
            self._running[key] = self._reserved.pop(key)
            self._say(key, Stage.KV_READY, Stage.DECODE_STARTED)

    def cancel(self, link: str, request_id: str) -> None:
        self._reserved.pop((link, request_id), None)
        self._running.pop((link, request_id), None)

    def submit(self, link: str, submit: pb.Submit) -> None:
        for request_id in (submit.request_id, *(member.request_id for member in submit.members)):
            self._submit((link, request_id), submit)

    def _submit(self, key: tuple[str, str], submit: pb.Submit) -> None:
        request = Request.unpack(submit.request)
        tokens = request.sampling.max_tokens
        if submit.phase == pb.DECODE:
            self._reserved[key] = Answer(tokens - 1, request.whole, begun=True)
            self._say(key, Stage.RESERVED)
        elif submit.phase == pb.BOTH:
            self._running[key] = Answer(tokens, request.whole)
            self._say(key, Stage.RESERVED, Stage.PREFILL_STARTED)
        else:
            output = self._say(key, Stage.PREFILL_STARTED, Stage.KV_STORED)
            output.token_ids.append(TOKEN)
            output.sources = Sources(computed=len(request.prompt))
            output.stored = Stored(num_blocks=-(-len(request.prompt) // BLOCK_SIZE), final=True)
            output.finish_reason = "length" if tokens == 1 else None

    def _say(self, key: tuple[str, str], *stages: Stage) -> Output:
        link, request_id = key
        output = Output(request_id=request_id, stamps={stage.value: 0.0 for stage in stages})
        self._outputs.setdefault(link, []).append(output)
        self._awake.set()
        return output

    async def _run(self, links: RouterLinks) -> None:
        while True:
            if not self._running and not self._outputs:
                self._awake.clear()
                await self._awake.wait()
            for link, outputs in self._step().items():
                links.send(link, pb.InstanceFrame(outputs=pack(outputs)))
            await asyncio.sleep(self._step_s)  # other requests join the batch meanwhile

    def _step(self) -> dict[str, list[Output]]:
        """Return the outputs of one step by link."""
        self._steps += 1
        outputs, self._outputs = self._outputs, {}
        for (link, request_id), answer in self._running.items():
            if not (tokens := answer.step()):
                continue
            last = not answer.left
            output = Output(
                request_id=request_id,
                token_ids=[TOKEN] * tokens,
                finish_reason="length" if last else None,
                stamps={Stage.FINISHED.value: 0.0} if last else {},
            )
            outputs.setdefault(link, []).append(output)
        self._running = {key: answer for key, answer in self._running.items() if answer.left}
        return outputs


async def main(step_s: float, routers: list[str], names: list[str]) -> None:
    """Run the mocks, each attached to all routers."""
    await asyncio.gather(
        *(MockInstance(step_s).serve(routers, hello(name, name.partition("-")[0], "demo")) for name in names)
    )


if __name__ == "__main__":
    uvloop.run(main(float(sys.argv[1]) / 1e3, sys.argv[2].split(","), sys.argv[3:]))
