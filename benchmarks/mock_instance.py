"""Mock instances that answer at once, for router benchmarks: the real control plane without an engine.

    python benchmarks/mock_instance.py STEP_MS ROUTER[,ROUTER…] NAME…     a NAME begins with the role: decode-0

An engine step gives each sequence one token, and one frame carries the tokens of all sequences. Steps begin at least STEP_MS
apart and take no time; at 0, a sequence finishes before the next one arrives, and a frame carries one token. Tokens of a
whole (non-streaming) answer go together, except for the first. A prefill has stored all KV when it has the first token.
Nothing is hashed, so no KV events are sent.
"""

import asyncio
import secrets
import sys
import time
from dataclasses import dataclass
from typing import cast

import uvloop

from pdserve.control.frame_connection import NONCE_BYTES, PROTOCOL_VERSION
from pdserve.instance.instance import Instance
from pdserve.instance.kv_events import KVEventPublisher
from pdserve.instance.router_link import RouterLinks
from pdserve.keys import TOKEN_BYTES, Layout
from pdserve.lifetime import Stage
from pdserve.proto import pdserve_pb2 as pb
from pdserve.roles.job import BATCHED_TOKENS

CONTEXT = 16384  # tokens
BLOCK_SIZE = 16
TOKEN = 100  # the only token of every answer


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
    """A mock with the interface used by `RouterLinks`. `outputs` goes into the next frame with the tokens of `running`."""

    def __init__(self, step_s: float) -> None:
        self.kv_events = KVEventPublisher()
        self._step_s = step_s
        self._reserved: dict[str, Answer] = {}  # by request id, until prefill has the first token
        self._running: dict[str, Answer] = {}
        self._outputs: list[pb.Output] = []
        self._awake = asyncio.Event()
        self._steps = 0

    async def serve(self, router: str, hello: pb.Hello) -> None:
        """Serve forever."""
        links = RouterLinks([router])
        async with asyncio.TaskGroup() as group:
            group.create_task(links.run(cast(Instance, self), hello))
            group.create_task(self._run(links))

    @property
    def heartbeat(self) -> pb.Heartbeat:
        return pb.Heartbeat(counters={"engine_steps": self._steps})

    def other_load(self, link: str) -> pb.Load:
        return pb.Load()

    def drop_link(self, link: str) -> None:
        self._reserved.clear()
        self._running.clear()

    def hand_over(self, link: str, message: pb.HandOver) -> None:
        if message.HasField("first_token") and message.request_id in self._reserved:
            self._running[message.request_id] = self._reserved.pop(message.request_id)
            self._say(message.request_id, Stage.KV_READY, Stage.DECODE_STARTED)

    def cancel(self, link: str, request_id: str) -> None:
        self._reserved.pop(request_id, None)
        self._running.pop(request_id, None)

    def submit(self, link: str, submit: pb.Submit) -> None:
        tokens = submit.sampling.max_tokens
        if submit.phase == pb.DECODE:
            self._reserved[submit.request_id] = Answer(tokens - 1, submit.whole, begun=True)
            self._say(submit.request_id, Stage.RESERVED)
        elif submit.phase == pb.BOTH:
            self._running[submit.request_id] = Answer(tokens, submit.whole)
            self._say(submit.request_id, Stage.RESERVED, Stage.PREFILL_STARTED)
        else:
            output = self._say(submit.request_id, Stage.PREFILL_STARTED, Stage.KV_STORED)
            output.token_ids.append(TOKEN)
            num_tokens = output.tokens.computed = len(submit.prompt) // TOKEN_BYTES
            output.stored.num_blocks, output.stored.final = -(-num_tokens // BLOCK_SIZE), True
            output.finish_reason = "length" if tokens == 1 else ""

    def _say(self, request_id: str, *stages: Stage) -> pb.Output:
        output = pb.Output(request_id=request_id, stamps=[pb.Stamp(stage=stage) for stage in stages])
        self._outputs.append(output)
        self._awake.set()
        return output

    async def _run(self, links: RouterLinks) -> None:
        while True:
            if not self._running and not self._outputs:
                self._awake.clear()
                await self._awake.wait()
            step = self._step()
            if step.outputs:
                links.broadcast(pb.InstanceFrame(step=step))
            await asyncio.sleep(self._step_s)  # other requests join the batch meanwhile

    def _step(self) -> pb.Step:
        self._steps += 1
        outputs, self._outputs = self._outputs, []
        for request_id, answer in self._running.items():
            if not (tokens := answer.step()):
                continue
            last = not answer.left
            outputs.append(
                pb.Output(
                    request_id=request_id,
                    token_ids=[TOKEN] * tokens,
                    finish_reason="length" if last else "",
                    stamps=[pb.Stamp(stage=Stage.FINISHED)] if last else [],
                )
            )
        self._running = {name: answer for name, answer in self._running.items() if answer.left}
        return pb.Step(outputs=outputs)


async def main(step_s: float, routers: list[str], names: list[str]) -> None:
    """Run the mocks; the load from one router does not affect the others."""
    roles = {name: name.partition("-")[0] for name in names}
    serving = [
        MockInstance(step_s).serve(router, hello(name, role, "demo"))
        for router in routers
        for name, role in roles.items()
    ]
    await asyncio.gather(*serving)


if __name__ == "__main__":
    uvloop.run(main(float(sys.argv[1]) / 1e3, sys.argv[2].split(","), sys.argv[3:]))
