"""A whole deployment called over gRPC: greedy tokens equal transformers', and health checks of instances."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc as stubs

from pdserve.cli.deployment import free_port


def test_tokens_equal_those_of_transformers(
    deploy: Any, checkpoint: Callable[..., Path], generate: Any, prompts: list[list[int]], wait_until: Any
) -> None:
    path, port, probe_port = checkpoint("llama"), free_port(), free_port()
    flags = {"decode": ["--grpc-health-port", str(probe_port)]}
    with deploy(model=str(path), grpc_port=port, flags=flags), grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = stubs.VllmEngineStub(channel)
        calls: list[Any] = []
        for prompt in prompts[:6]:
            sampling = vllm.SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
            tokenized = vllm.TokenizedInput(input_ids=prompt)
            stream = len(calls) % 2 == 0
            calls.append(
                stub.Generate(vllm.GenerateRequest(tokenized=tokenized, sampling_params=sampling, stream=stream))
            )
        answers = [[*call] for call in calls]
        tokens = [
            [
                id
                for message in answer
                for id in (message.chunk.token_ids if len(answer) > 1 else message.complete.output_ids)
            ]
            for answer in answers
        ]
        assert tokens == generate(path, prompts[:6], 16)
        loads = stub.GetLoads(vllm.GetLoadsRequest()).loads
        assert len(loads) == 1 and loads[0].max_total_num_tokens > 0
        with grpc.insecure_channel(f"127.0.0.1:{probe_port}") as probe:
            health: Any = health_pb2_grpc.HealthStub(probe)
            for service in ("", "liveness", "readiness"):
                status = health.Check(health_pb2.HealthCheckRequest(service=service)).status
                assert status == health_pb2.HealthCheckResponse.SERVING
