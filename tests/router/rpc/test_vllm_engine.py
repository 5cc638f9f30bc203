"""The router's gRPC port, called with the stubs that vLLM's clients use, on top of a scripted backend."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc as stubs
from smg_grpc_proto.generated import common_pb2 as common

from pdserve.errors import BadRequest, Unavailable
from pdserve.output import Output
from pdserve.router.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tests.router.conftest import ScriptedBackend

Serve = Callable[..., AbstractContextManager[int]]
SERVICE = "vllm.grpc.engine.VllmEngine"
PROMPT = [40, 41, 42]


@contextmanager
def connected(port: int) -> Iterator[Any]:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield stubs.VllmEngineStub(channel)


@pytest.fixture
def stub(serve: Serve) -> Iterator[Any]:
    with serve() as port, connected(port) as stub:
        yield stub


def request(stream: bool = False, request_id: str = "", **sampling: Any) -> Any:
    tokenized = vllm.TokenizedInput(input_ids=PROMPT)
    params = vllm.SamplingParams(**{"max_tokens": 8, **sampling})
    return vllm.GenerateRequest(request_id=request_id, tokenized=tokenized, sampling_params=params, stream=stream)


def failure(call: Callable[[], object]) -> tuple[grpc.StatusCode, str, dict[str, str]]:
    """Return status, message and trailing metadata with which a call fails."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    error: Any = caught.value
    return error.code(), error.details(), dict(error.trailing_metadata() or ())


def test_whole_answers_and_streams(stub: Any, backend: ScriptedBackend, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(" Paris.")
    backend.script.cached_tokens = 2
    [answer] = stub.Generate(request(request_id="chatcmpl-7", temperature=0.7, seed=3))
    whole = answer.complete
    assert ([*whole.output_ids], whole.finish_reason, whole.prompt_tokens) == (ids, "length", 3)
    assert (whole.completion_tokens, whole.cached_tokens, whole.index) == (len(ids), 2, 0)
    sent = backend.requests[0]
    assert (sent.request_id, [*sent.prompt], sent.sampling.temperature, sent.sampling.seed) == (
        *("chatcmpl-7", PROMPT),
        *(0.7, 3),
    )
    assert (sent.sampling.top_p, sent.sampling.repetition_penalty, sent.sampling.max_tokens) == (1.0, 1.0, 8)
    messages = [*stub.Generate(request(stream=True, n=2))]
    for index in (0, 1):
        chunks = [one.chunk for one in messages if one.HasField("chunk") and one.chunk.index == index]
        assert [id for chunk in chunks for id in chunk.token_ids] == ids
        assert all(chunk.completion_tokens == len(chunk.token_ids) for chunk in chunks)
    completed = [one.complete for one in messages if one.HasField("complete")]
    assert sorted(one.index for one in completed) == [0, 1]
    assert {one.finish_reason for one in completed} == {"length"}


def test_text_prompts_and_room_for_the_answer(stub: Any, backend: ScriptedBackend, tokenizer: Tokenizer) -> None:
    [answer] = stub.Generate(vllm.GenerateRequest(text="hello world"))
    assert answer.complete.output_ids
    prompt = [*backend.requests[0].prompt]
    assert prompt == tokenizer.encode("hello world")
    assert backend.requests[0].sampling.max_tokens == 256 - len(prompt)


def test_log_probabilities(stub: Any, backend: ScriptedBackend, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(" Paris.")
    [answer] = stub.Generate(request(logprobs=1, prompt_logprobs=1, stream=False))
    output, prompt = answer.complete.output_logprobs, answer.complete.input_logprobs
    assert [*output.token_ids] == ids and [*output.token_logprobs] == [-0.5] * len(ids)
    assert [[*top.token_ids] for top in output.top_logprobs] == [[id] for id in ids]
    assert [*prompt.token_ids] == PROMPT and not prompt.token_logprobs[0].HasField("value")
    assert [one.value for one in prompt.token_logprobs[1:]] == [-1.0, -1.0]
    messages = [*stub.Generate(request(logprobs=0, prompt_logprobs=0, stream=True))]
    scored = [one.chunk.HasField("input_logprobs") for one in messages if one.HasField("chunk")]
    assert scored == [True, *[False] * (len(scored) - 1)]
    assert not messages[0].chunk.output_logprobs.top_logprobs


def test_what_ended_the_answer(stub: Any, backend: ScriptedBackend, tokenizer: Tokenizer) -> None:
    [answer] = stub.Generate(request(stop=["ris"]))
    assert (answer.complete.finish_reason, answer.complete.matched_stop_str) == ("stop", "ris")
    backend.generates([50, 51], "stop")
    [answer] = stub.Generate(request(stop_token_ids=[51]))
    assert (answer.complete.finish_reason, answer.complete.matched_token_id) == ("stop", 51)


def test_constraints(stub: Any, backend: ScriptedBackend) -> None:
    for constraint in ({"regex": "a+"}, {"choice": vllm.ChoiceConstraint(choices=["a", "b"])}, {"json_object": True}):
        [_] = stub.Generate(request(**constraint))
    assert [one.sampling.grammar for one in backend.requests] == [
        *('{"regex": "a+"}', '{"choice": ["a", "b"]}'),
        '{"json": {"type": "object"}}',
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling_params": {"top_p": 1.5}}, "top_p must be above 0 and at most 1, not 1.5"),
        ({"sampling_params": {"logprobs": -1}}, "logprobs must be from 0 to 20, not -1"),
        ({"sampling_params": {"structural_tag": "{}"}}, "structural_tag is not supported"),
        ({"sampling_params": {"json_schema": "{"}}, "must be a JSON schema"),
        ({"tokenized": {"input_ids": [10**6]}}, "prompt holds the token id 1000000"),
        ({"tokenized": {"input_ids": []}}, "the prompt is empty"),
        ({"tokenized": {"input_ids": [40] * 300}}, "context is 256 tokens"),
        ({"kv_transfer_params_json": "{}"}, "address it as one worker"),
        ({"data_parallel_rank": 1}, "data_parallel_rank must be 0"),
        ({"request_id": "a b"}, "request_id must have 1 to 128"),
        ({"media_refs": {"items": [{"url": "http://x"}]}}, "media_refs is not supported; only text"),
    ],
)
def test_invalid_requests(stub: Any, changes: dict[str, Any], message: str) -> None:
    body = {"tokenized": {"input_ids": PROMPT}} | changes
    code, details, _ = failure(lambda: [*stub.Generate(vllm.GenerateRequest(**body))])
    assert code is grpc.StatusCode.INVALID_ARGUMENT and message in details


def test_malformed_and_oversize_messages(serve: Serve, backend: ScriptedBackend) -> None:
    with serve(max_body_bytes=20_000) as port, grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        generate: Any = channel.unary_stream(f"/{SERVICE}/Generate")
        methods: Any = {name: channel.unary_unary(f"/{SERVICE}/{name}") for name in ("Abort", "FlushCache")}
        code, details, metadata = failure(lambda: [*generate(b"\xff\xff")])
        assert code is grpc.StatusCode.INVALID_ARGUMENT and "malformed protobuf" in details
        assert metadata["pdserve-error"] == "invalid_protobuf"
        assert failure(lambda: methods["Abort"](b"\xff"))[0] is grpc.StatusCode.INVALID_ARGUMENT
        large = vllm.GenerateRequest(text="x" * 30_000).SerializeToString()
        code, details, _ = failure(lambda: [*generate(large)])
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and "20000" in details
        for name, instead in {"Embed": "POST /v1/embeddings", "SubscribeKvEvents": "--kv-events-config"}.items():
            refused: Any = channel.unary_stream(f"/{SERVICE}/{name}")
            code, details, _ = failure(partial(list, refused(b"")))
            assert code is grpc.StatusCode.UNIMPLEMENTED and instead in details
        assert failure(lambda: methods["FlushCache"](b""))[0] is grpc.StatusCode.UNIMPLEMENTED
        assert not backend.requests
        assert [*generate(request().SerializeToString())], "the connection still serves"


def test_abort_ends_the_request_of_the_same_key_only(
    serve: Serve, backend: ScriptedBackend, eventually: Callable[..., None]
) -> None:
    backend.script.hang = True
    backend.script.chunks = [[Output([50])]]
    with serve(api_key="one,two") as port, connected(port) as stub:
        one, two = ((("authorization", f"Bearer {key}"),) for key in ("one", "two"))
        call = stub.Generate(request(stream=True, request_id="r"), metadata=one)
        assert [*next(call).chunk.token_ids] == [50]
        abort = vllm.AbortRequest(request_ids=["r", "unknown"])
        stub.Abort(abort, metadata=two)
        assert stub.GetServerInfo(vllm.GetServerInfoRequest(), metadata=one).active_requests == 1
        stub.Abort(abort, metadata=one)
        [last] = call
        assert last.complete.finish_reason == "abort"
        assert backend.streams[0].cancelled
        eventually(
            lambda: stub.GetServerInfo(vllm.GetServerInfoRequest(), metadata=one).active_requests == 0,
        )


def test_clients_that_leave_and_deadlines_free_the_request(
    stub: Any, backend: ScriptedBackend, eventually: Callable[..., None]
) -> None:
    backend.script.hang = True
    backend.script.chunks = [[Output([50])]]
    call = stub.Generate(request(stream=True))
    next(call)
    call.cancel()
    eventually(lambda: backend.streams[0].cancelled)
    code, _, _ = failure(lambda: [*stub.Generate(request(), timeout=0.5)])
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    eventually(lambda: len(backend.streams) < 2 or backend.streams[1].cancelled)


def test_keys_and_limits(serve: Serve, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[alice]\nkey = "secret"\nrequests = "1/h"\n')
    with serve(keys_file=str(keys)) as port, connected(port) as stub:
        code, details, _ = failure(lambda: [*stub.Generate(request())])
        assert code is grpc.StatusCode.UNAUTHENTICATED and "valid API key" in details
        wrong, right = ((("x-api-key", key),) for key in ("wrong", "secret"))
        assert failure(lambda: stub.HealthCheck(vllm.HealthCheckRequest(), metadata=wrong))[0] is code
        assert [*stub.Generate(request(), metadata=right)]
        code, _, metadata = failure(lambda: [*stub.Generate(request(), metadata=right)])
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert metadata["pdserve-error"] == "rate_limit_requests" and int(metadata["grpc-retry-pushback-ms"]) > 0


def test_a_refused_grammar_counts_as_a_request(serve: Serve, tmp_path: Path) -> None:
    class Refusing:
        async def check(self, *_: object) -> None:
            raise BadRequest("the grammar cannot be used", kind="invalid_grammar")

    keys, refusals = tmp_path / "keys.toml", []
    keys.write_text('[alice]\nkey = "secret"\nrequests = "2/h"\n')
    with serve(grammars=Refusing(), keys_file=str(keys)) as port, connected(port) as stub:
        for _ in range(3):
            call = partial(stub.Generate, request(regex="a+"), metadata=(("x-api-key", "secret"),))
            refusals.append(failure(lambda call=call: [*call()])[2]["pdserve-error"])  # type: ignore[misc]
    assert refusals == ["invalid_grammar", "invalid_grammar", "rate_limit_requests"]


def test_errors_of_the_fleet(stub: Any, backend: ScriptedBackend) -> None:
    backend.fails(Unavailable("instance lost", kind="instance_lost", retry_after_s=2))
    code, details, metadata = failure(lambda: [*stub.Generate(request())])
    assert (code, details) == (grpc.StatusCode.UNAVAILABLE, "instance lost")
    assert metadata == {"pdserve-error": "instance_lost", "grpc-retry-pushback-ms": "2000"}
    backend.script.error = RuntimeError("a bug")
    code, details, _ = failure(lambda: [*stub.Generate(request())])
    assert code is grpc.StatusCode.INTERNAL and "bug" not in details


def test_the_model_and_its_tokenizer(stub: Any, backend: ScriptedBackend, tokenizer_dir: Path) -> None:
    info = stub.GetModelInfo(vllm.GetModelInfoRequest())
    assert (info.served_model_name, info.max_context_length, info.model_type) == ("demo", 256, "llama")
    assert ([*info.eos_token_ids], info.is_generation, info.tokenizer_path) == ([0], True, str(tokenizer_dir))
    pieces = [*stub.GetTokenizer(common.GetTokenizerRequest())]
    data = b"".join(piece.data for piece in pieces)
    assert pieces[-1].sha256 == hashlib.sha256(data).hexdigest()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.read("tokenizer.json") == (tokenizer_dir / "tokenizer.json").read_bytes()
        assert {"config.json", "tokenizer_config.json"} <= {*archive.namelist()}
    assert stub.GetServerInfo(vllm.GetServerInfoRequest()).block_size == 16
    backend.info = None
    assert failure(lambda: stub.GetModelInfo(vllm.GetModelInfoRequest()))[0] is grpc.StatusCode.UNAVAILABLE


def test_health_checks_and_reflection(serve: Serve, backend: ScriptedBackend) -> None:
    with serve(api_key="secret") as port, grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)

        def check(service: str) -> str:
            status = health.Check(health_pb2.HealthCheckRequest(service=service)).status
            return health_pb2.HealthCheckResponse.ServingStatus.Name(status)

        services = ("", "liveness", "readiness", SERVICE)
        assert [check(service) for service in services] == ["SERVING"] * 4
        watch = health.Watch(health_pb2.HealthCheckRequest(service="readiness"))
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        backend.not_ready = "no decode instance"
        assert [check(service) for service in services] == ["NOT_SERVING", "SERVING", "NOT_SERVING", "NOT_SERVING"]
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()
        code, details, _ = failure(lambda: check("other"))
        assert code is grpc.StatusCode.NOT_FOUND and "'liveness'" in details
        assert {SERVICE, "grpc.health.v1.Health"} <= {*ProtoReflectionDescriptorDatabase(channel).get_services()}


def test_tls(serve: Serve, tmp_path: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("localhost")
    issued.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    issued.private_key_pem.write_to_path(tmp_path / "key.pem")
    settings = {"ssl_certfile": str(tmp_path / "cert.pem"), "ssl_keyfile": str(tmp_path / "key.pem")}
    with serve(**settings) as port:
        credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
        with grpc.secure_channel(f"localhost:{port}", credentials) as channel:
            assert [*stubs.VllmEngineStub(channel).Generate(request())]
        with connected(port) as stub:
            assert failure(lambda: [*stub.Generate(request(), timeout=60)])[0] is grpc.StatusCode.UNAVAILABLE
