"""Mock instances that answer at once, for measuring a router: the real control plane, and nothing behind it.

    python benchmarks/mock_instance.py STEP_MS ROUTER[,ROUTER…] NAME…     a NAME begins with the role: decode-0

An engine step gives each sequence a token, and one frame carries those of all, as it would from an instance. Steps begin
STEP_MS apart at least, and take no time; at 0, a sequence is at its end before another one comes, and a frame carries one
token. A prefill has stored everything when it has the first token. Nothing is hashed, so no news of a pool is sent.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator

import grpc
import uvloop

from pdserve.lifetime import Stage
from pdserve.link import CHANNEL_OPTIONS, HEARTBEAT_S, PROTOCOL_VERSION
from pdserve.proto import pdserve_pb2 as pb
from pdserve.proto.pdserve_pb2_grpc import RouterStub

CONTEXT = 16384  # tokens
BLOCK_SIZE = 16
TOKEN = 100  # the answer to everything, again and again


def hello(name: str, role: str, model: str) -> pb.Hello:
    """What an instance of `pdserve demo`'s model would say, with a longer context and a large pool."""
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
        namespace=b"mock",
        epoch=time.monotonic_ns(),
        block_size=BLOCK_SIZE,
        num_blocks=1 << 20,
        block_bytes=1 << 13,
        max_model_len=CONTEXT,
        vocab_size=2048,
        connector="mock",
        protocol_version=PROTOCOL_VERSION,
        layout=layout,
    )


class MockInstance:
    """One of them. `outputs` is what the next frame carries beside the tokens of `running`."""

    def __init__(self, hello: pb.Hello, step_s: float) -> None:
        self._hello = hello
        self._step_s = step_s
        self._reserved: dict[str, int] = {}  # request id → tokens to generate, once prefill has the first
        self._running: dict[str, int] = {}  # request id → tokens left
        self._outputs: list[pb.Output] = []
        self._awake = asyncio.Event()
        self._steps = 0

    async def serve(self, router: str) -> None:
        """Until the router closes the stream."""
        async with grpc.aio.insecure_channel(router, options=CHANNEL_OPTIONS) as channel:
            stub = RouterStub(channel)
            async for frame in stub.Attach(self._frames(), wait_for_ready=True):
                self._receive(frame)

    def _receive(self, frame: pb.RouterFrame) -> None:
        match frame.WhichOneof("frame"):
            case "submit":
                self._submitted(frame.submit)
            case "hand_over" if frame.hand_over.HasField("first_token"):
                request_id = frame.hand_over.request_id
                if request_id in self._reserved:
                    self._running[request_id] = self._reserved.pop(request_id)
                    self._say(request_id, Stage.KV_READY, Stage.DECODE_STARTED)
            case "cancel":
                self._reserved.pop(frame.cancel.request_id, None)
                self._running.pop(frame.cancel.request_id, None)
        self._awake.set()

    def _submitted(self, submit: pb.Submit) -> None:
        tokens = submit.sampling.max_tokens
        if submit.phase == pb.DECODE:
            self._reserved[submit.request_id] = tokens - 1
            self._say(submit.request_id, Stage.RESERVED)
        elif submit.phase == pb.BOTH:
            self._running[submit.request_id] = tokens
            self._say(submit.request_id, Stage.RESERVED, Stage.PREFILL_STARTED)
        else:
            output = self._say(submit.request_id, Stage.PREFILL_STARTED, Stage.FIRST_TOKEN, Stage.KV_STORED)
            output.token_ids.append(TOKEN)
            output.tokens.computed = len(submit.prompt)
            output.stored.num_blocks, output.stored.final = -(-len(submit.prompt) // BLOCK_SIZE), True
            output.finish_reason = "length" if tokens == 1 else ""

    def _say(self, request_id: str, *stages: Stage) -> pb.Output:
        output = pb.Output(request_id=request_id, stamps=[pb.Stamp(stage=stage) for stage in stages])
        self._outputs.append(output)
        return output

    async def _frames(self) -> AsyncIterator[pb.InstanceFrame]:
        yield pb.InstanceFrame(hello=self._hello)
        loop = asyncio.get_running_loop()
        beat = step = loop.time()
        while True:
            if loop.time() >= beat:
                beat = loop.time() + HEARTBEAT_S
                yield pb.InstanceFrame(heartbeat=pb.Heartbeat(counters={"engine_steps": self._steps}))
            if self._running or self._outputs:
                if loop.time() < step:
                    await asyncio.sleep(step - loop.time())  # others join it meanwhile
                step = loop.time() + self._step_s
                yield pb.InstanceFrame(step=self._step())
                continue
            self._awake.clear()
            try:
                async with asyncio.timeout_at(beat):
                    await self._awake.wait()
            except TimeoutError:
                continue

    def _step(self) -> pb.Step:
        self._steps += 1
        outputs, self._outputs = self._outputs, []
        for request_id in self._running:
            self._running[request_id] -= 1
            last = self._running[request_id] == 0
            outputs.append(
                pb.Output(
                    request_id=request_id,
                    token_ids=[TOKEN],
                    finish_reason="length" if last else "",
                    stamps=[pb.Stamp(stage=Stage.FINISHED)] if last else [],
                )
            )
        self._running = {request_id: left for request_id, left in self._running.items() if left}
        return pb.Step(outputs=outputs)


async def main(step_s: float, routers: list[str], names: list[str]) -> None:
    """What one router asks makes no difference to the others."""
    pairs = [
        (router, MockInstance(hello(name, name.partition("-")[0], "demo"), step_s))
        for router in routers
        for name in names
    ]
    await asyncio.gather(*(mock.serve(router) for router, mock in pairs))


if __name__ == "__main__":
    uvloop.run(main(float(sys.argv[1]) / 1e3, sys.argv[2].split(","), sys.argv[3:]))
