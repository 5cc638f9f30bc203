"""/v1/embeddings, /score, /classify and /rerank: by the cosine similarity of embeddings, or by a cross-encoder."""

import asyncio
import base64
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import structs
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from pdserve.errors import BadRequest, InvalidParameter
from pdserve.request import SamplingParams
from pdserve.router.api.answers import Answer
from pdserve.router.api.generation import Generation, Json, read
from pdserve.router.api.http_responses import CLIENT_GONE, json_response
from pdserve.router.api.parsing import Body, BodyType, JsonBody, or_default
from pdserve.router.api.requests import build_requests, check_model, check_token_ids, prompt_forms, truncate
from pdserve.router.api.schemas import IDS, LISTS, TEXT, Array, Short, untyped
from pdserve.router.backend import Backend, ModelInfo, TokenStream
from pdserve.router.routed_request import RoutedRequest
from pdserve.router.text.tokenizer import Tokenizer
from pdserve.router.web.dialect import Dialect, admitted
from pdserve.router.web.endpoint import example
from pdserve.router.web.parse_queue import LARGE_BODY

MAX_INPUTS = 2048  # as in OpenAI's API
TEXT_BYTES = 256  # besides its own, that take about as long as what each text needs
OPENED_AT_ONCE = 32  # requests, between which others are served: each takes some 0.3 ms
DOCUMENTS = ["Paris is the capital of France.", "Rome is the capital of Italy."]
Vectors = Sequence["np.ndarray[tuple[int], np.dtype[np.float32]]"]


# ---- bodies and answers -------------------------------------------------------------------------------------------


class EmbeddingBody(Body):
    model: str | None = None
    input: Any = untyped({"anyOf": [TEXT, IDS, *LISTS]})
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    truncate_prompt_tokens: int | None = None
    user: Short | None = None


class ScoreBody(Body):
    model: str | None = None
    text_1: str | Array[str]
    text_2: str | Array[str]
    truncate_prompt_tokens: int | None = None


class ClassifyBody(Body):
    model: str | None = None
    input: Any = untyped({"anyOf": [TEXT, IDS, *LISTS]})
    truncate_prompt_tokens: int | None = None


class RerankBody(Body):
    model: str | None = None
    query: str
    documents: Array[str] = Field(min_length=1)
    top_n: int | None = Field(None, ge=0)
    return_documents: bool | None = None
    truncate_prompt_tokens: int | None = None


class EmbeddingUsage(Answer):
    prompt_tokens: int
    total_tokens: int


class Embedding(Answer):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Listed(Answer):
    """Common fields of the answers that are lists."""

    object: Literal["list"]
    model: str
    usage: EmbeddingUsage


class Embeddings(Listed):
    data: list[Embedding]


class Score(Answer):
    index: int
    object: Literal["score"]
    score: float


class Scores(Listed):
    id: str
    created: int
    data: list[Score]


class Classification(Answer):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classifications(Listed):
    id: str
    created: int
    data: list[Classification]


class Document(Answer):
    text: str


class Ranked(Answer):
    index: int
    relevance_score: float
    document: Document | None = None


class Ranking(Answer):
    id: str
    model: str
    results: list[Ranked]
    usage: EmbeddingUsage


# ---- the endpoints ------------------------------------------------------------------------------------------------

ScoreRequest = Annotated[JsonBody[ScoreBody], example(text_1="The capital of France", text_2=DOCUMENTS)]
RerankRequest = Annotated[JsonBody[RerankBody], example(query="The capital of France", documents=DOCUMENTS)]
ParseTexts = Callable[[BodyType, RoutedRequest, Tokenizer, ModelInfo], Generation]


class EmbeddingEndpoints(Dialect):
    """Parses a body, waits for admission, has its texts embedded, and answers with what follows from the vectors."""

    tag = "embeddings"

    @admitted("/v1/embeddings", "req-", Embeddings)
    async def embeddings(
        self, request: Request, body: Annotated[JsonBody[EmbeddingBody], example(input=DOCUMENTS)]
    ) -> Response:
        """The embeddings of texts."""
        return await self._embed(request, EmbeddingBody, body, parse_embedding, embedding_body)

    @admitted("/v1/score", "req-", Scores)
    async def score_v1(self, request: Request, body: ScoreRequest) -> Response:
        """The same as /score."""
        return await self.score(request, body)

    @admitted("/score", "req-", Scores)
    async def score(self, request: Request, body: ScoreRequest) -> Response:
        """Scores of pairs of texts, by a cross-encoder or by their embeddings."""
        return await self._embed(request, ScoreBody, body, parse_score, score_body)

    @admitted("/classify", "req-", Classifications)
    async def classify(
        self, request: Request, body: Annotated[JsonBody[ClassifyBody], example(input=DOCUMENTS)]
    ) -> Response:
        """The classes of texts, by a sequence classifier."""
        build = partial(classify_body, self.service.tokenizer.label)
        return await self._embed(request, ClassifyBody, body, parse_classify, build)

    @admitted("/v2/rerank", "req-", Ranking)
    async def rerank_v2(self, request: Request, body: RerankRequest) -> Response:
        """The same as /rerank."""
        return await self.rerank(request, body)

    @admitted("/v1/rerank", "req-", Ranking)
    async def rerank_v1(self, request: Request, body: RerankRequest) -> Response:
        """The same as /rerank."""
        return await self.rerank(request, body)

    @admitted("/rerank", "req-", Ranking)
    async def rerank(self, request: Request, body: RerankRequest) -> Response:
        """Documents in the order of their scores with a query, by a cross-encoder or by their embeddings."""
        return await self._embed(request, RerankBody, body, parse_rerank, rerank_body)

    async def _embed(
        self,
        request: Request,
        model: type[BodyType],
        body: JsonBody[BodyType],
        parse: ParseTexts[BodyType],
        build: Callable[[BodyType, Generation, Vectors], Json],
    ) -> Response:
        service, client, vectors = self.service, request.state.client, list[Vectors]()
        more_bytes = TEXT_BYTES * body.count(b",")
        fields, generation = await service.parse(request, model, body, partial(_parse_texts, parse), more_bytes)
        slot = await service.enter(request, generation)
        if slot is None:
            return Response(status_code=CLIENT_GONE)

        async def run() -> None:
            vectors.append(await embed(generation, service.backend, slot.release))

        try:
            finished = await client.run(run())
        finally:
            slot.release(0)  # of a client that has left before anything ran
        if not finished:
            return Response(status_code=CLIENT_GONE)
        num_bytes = len(body) + more_bytes + sum(vector.nbytes for vector in vectors[0])
        if num_bytes < LARGE_BODY:
            return json_response(build(fields, generation, vectors[0]))
        return await asyncio.to_thread(lambda: json_response(build(fields, generation, vectors[0])))


def _parse_texts(
    parse: ParseTexts[BodyType], body: BodyType, draft: RoutedRequest, tokenizer: Tokenizer, info: ModelInfo, _: int
) -> tuple[BodyType, Generation]:
    return body, parse(body, draft, tokenizer, info)


# ---- from bodies to requests --------------------------------------------------------------------------------------


def parse_embedding(body: EmbeddingBody, draft: RoutedRequest, tokenizer: Tokenizer, info: ModelInfo) -> Generation:
    """Parse a body of /v1/embeddings. Raises `RequestError`."""
    check_model(body.model, info.name)
    size = info.embedding_size
    if body.dimensions is not None and size and not 1 <= body.dimensions <= size:
        raise InvalidParameter("dimensions", f"dimensions must be from 1 to {size}, not {body.dimensions}")
    if info.classifies:
        message = f"{info.name} has no embeddings, it classifies texts: use /classify, /score or /rerank"
        raise BadRequest(message, kind="no_embeddings", param="model")
    return _parse(body, prompt_forms(body.input, "input"), "input", draft, tokenizer, info)


def parse_classify(body: ClassifyBody, draft: RoutedRequest, tokenizer: Tokenizer, info: ModelInfo) -> Generation:
    """Parse a body of /classify. Raises `RequestError`."""
    check_model(body.model, info.name)
    if not info.classifies:
        message = f"{info.name} is no sequence classifier, so it has no classes"
        raise BadRequest(message, kind="no_classes", param="model")
    return _parse(body, prompt_forms(body.input, "input"), "input", draft, tokenizer, info)


def parse_score(body: ScoreBody, draft: RoutedRequest, tokenizer: Tokenizer, info: ModelInfo) -> Generation:
    """Parse a body of /score, which pairs one text with each, or two lists side by side. Raises `RequestError`."""
    first = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    second = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    if not (first and second and len(first) in (1, len(second))):
        raise InvalidParameter(
            "text_1", "text_1 and text_2 must be lists of as many texts, or text_1 a single one; none empty"
        )
    return _parse_pairs(body, "text_1", first, second, draft, tokenizer, info)


def parse_rerank(body: RerankBody, draft: RoutedRequest, tokenizer: Tokenizer, info: ModelInfo) -> Generation:
    """Parse a body of /rerank. Raises `RequestError`."""
    return _parse_pairs(body, "documents", [body.query], body.documents, draft, tokenizer, info)


def _parse_pairs(
    body: ScoreBody | RerankBody,
    param: str,
    first: list[str],
    second: list[str],
    draft: RoutedRequest,
    tokenizer: Tokenizer,
    info: ModelInfo,
) -> Generation:
    """Return a request for each pair or, for similarities, one for each text. One first text belongs to all others."""
    check_model(body.model, info.name)
    _check_num_inputs(len(second), param)
    if not info.classifies:
        return _parse(body, [*first, *second], param, draft, tokenizer, info)
    if info.embedding_size > 1:
        message = f"{info.name} has {info.embedding_size} classes; pairs of texts are scored by a model with one"
        raise BadRequest(message, kind="no_embeddings", param="model")
    pairs = zip(first * len(second) if len(first) == 1 else first, second, strict=True)
    return _parse(body, [tokenizer.encode_pair(*pair) for pair in pairs], param, draft, tokenizer, info)


def _parse(
    body: EmbeddingBody | ClassifyBody | ScoreBody | RerankBody,
    texts: Sequence[str | list[int]],
    param: str,
    draft: RoutedRequest,
    tokenizer: Tokenizer,
    info: ModelInfo,
) -> Generation:
    if not info.embedding_size:
        message = f"{info.name} has no embeddings: start its instances with --pooling last, mean or cls"
        raise BadRequest(message, kind="no_embeddings", param="model")
    _check_num_inputs(len(texts), param)
    encoded = [tokenizer.encode(text) if isinstance(text, str) else text for text in texts]
    prompts = [truncate(prompt, body.truncate_prompt_tokens, 1, info) for prompt in encoded]
    for prompt in prompts:
        check_token_ids(prompt, info.vocab_size, param)
        if not prompt:
            raise BadRequest(f"a text of {param} is empty: it has no tokens", kind="invalid_prompt", param=param)
        if len(prompt) >= info.max_model_len:
            message = f"a text of {param} has {len(prompt)} tokens; there is room for {info.max_model_len - 1}"
            raise BadRequest(message, kind="context_length_exceeded", param=param)
    sampling = SamplingParams(max_tokens=1, embed=True)
    requests = build_requests(structs.replace(draft, whole=True), prompts, 1, sampling, info)
    return Generation(
        id=draft.request_id, model=info.name, prompts=prompts, requests=requests, created=int(time.time())
    )


def _check_num_inputs(count: int, param: str) -> None:
    if count > MAX_INPUTS:
        raise InvalidParameter(param, f"{param} has {count} texts; at most {MAX_INPUTS} are allowed")


# ---- from vectors to answers --------------------------------------------------------------------------------------


async def embed(generation: Generation, backend: Backend, release: Callable[[int], None]) -> Vectors:
    """Return the embedding of each prompt.

    Args:
        release: called at the end with the number of tokens used.
    """
    streams: list[TokenStream] = []
    try:
        for number, request in enumerate(generation.requests, 1):
            streams.append(backend.open(request))
            if not number % OPENED_AT_ONCE:
                await asyncio.sleep(0)
        found = [b""] * len(streams)
        async for index, outputs in read(dict(enumerate(streams))):
            found[index] += b"".join(output.embedding for output in outputs)
    finally:
        for stream in streams:
            stream.cancel()
        release(generation.prompt_tokens if streams else 0)
    return [np.frombuffer(one, "<f4") for one in found]


def embedding_body(body: EmbeddingBody, generation: Generation, vectors: Vectors) -> Json:
    """Return the answer of /v1/embeddings. Shorter vectors are the first dimensions, scaled to length 1 again."""
    data = []
    for index, vector in enumerate(vectors):
        if body.dimensions is not None:
            vector = vector[: body.dimensions]
            vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
        value = vector.tolist() if body.encoding_format != "base64" else base64.b64encode(vector.tobytes()).decode()
        data.append({"object": "embedding", "index": index, "embedding": value})
    return {"object": "list", "model": generation.model, "data": data, "usage": _usage(generation)}


def classify_body(label: Callable[[int], str], body: ClassifyBody, generation: Generation, vectors: Vectors) -> Json:
    """Return the answer of /classify; `label` returns the name of a class."""
    data = [
        {"index": index, "label": label(int(probs.argmax())), "probs": probs.tolist(), "num_classes": len(probs)}
        for index, probs in enumerate(vectors)
    ]
    return {**_head(generation), "data": data, "usage": _usage(generation)}


def score_body(body: ScoreBody, generation: Generation, vectors: Vectors) -> Json:
    """Return the answer of /score."""
    scores = _scores(vectors, 1 if isinstance(body.text_2, str) else len(body.text_2))
    data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
    return {**_head(generation), "data": data, "usage": _usage(generation)}


def rerank_body(body: RerankBody, generation: Generation, vectors: Vectors) -> Json:
    """Return the answer of /rerank: the documents by their scores with the query."""
    scores = _scores(vectors, len(body.documents))
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: or_default(body.top_n, len(scores)) or None]
    documents = body.documents if or_default(body.return_documents, True) else None
    results = [
        {"index": index, "relevance_score": scores[index]}
        | ({} if documents is None else {"document": {"text": documents[index]}})
        for index in order
    ]
    return {"id": generation.id, "model": generation.model, "usage": _usage(generation), "results": results}


def _scores(vectors: Vectors, num_pairs: int) -> list[float]:
    """Return the score of each pair: a cross-encoder's own, or the similarity of the embeddings of its texts."""
    first, second = vectors[:-num_pairs], vectors[-num_pairs:]
    if not first:
        return [float(vector[0]) for vector in second]
    first = [*first] * num_pairs if len(first) == 1 else first
    return [
        float(one @ other) / max(float(np.linalg.norm(one) * np.linalg.norm(other)), 1e-12)
        for one, other in zip(first, second, strict=True)
    ]


def _head(generation: Generation) -> Json:
    return {"id": generation.id, "object": "list", "created": generation.created, "model": generation.model}


def _usage(generation: Generation) -> Json:
    return {"prompt_tokens": generation.prompt_tokens, "total_tokens": generation.prompt_tokens}
