"""The shapes of answers, as JSON schemas for /openapi.json: what is written here is in every answer, and nothing else."""

from typing import Any

Schema = dict[str, Any]
TEXT, WHOLE, NUMBER = ({"type": kind} for kind in ("string", "integer", "number"))
TEXT_OR_NONE, WHOLE_OR_NONE = ({"type": [kind, "null"]} for kind in ("string", "integer"))
ANYTHING: Schema = {"type": "object"}
OBJECT_OR_NONE: Schema = {"type": ["object", "null"]}


def each(item: Schema) -> Schema:
    return {"type": "array", "items": item}


def just(*values: str) -> Schema:
    return {"enum": list(values)}


def object_of(maybe: Schema | None = None, **properties: Schema) -> Schema:
    """With all of these properties, some of `maybe`, and no others."""
    return {
        "type": "object",
        "required": list(properties),
        "properties": {**properties, **(maybe or {})},
        "additionalProperties": False,
    }


ERROR = object_of(error=object_of(message=TEXT, type=TEXT, param=TEXT_OR_NONE, code=TEXT))
IDS = each(WHOLE)
USAGE = object_of(
    prompt_tokens=WHOLE,
    completion_tokens=WHOLE,
    total_tokens=WHOLE,
    prompt_tokens_details=object_of(cached_tokens=WHOLE),
)
CALL = object_of(id=TEXT, type=just("function"), function=object_of(name=TEXT, arguments=TEXT))
MESSAGE = object_of({"tool_calls": each(CALL)}, role=just("assistant"), content=TEXT_OR_NONE, refusal={"type": "null"})
ENDS = just("stop", "length", "tool_calls")


def generated(kind: str, said: dict[str, Schema]) -> Schema:
    """A completion or a chat completion, with what its choices say."""
    choice = object_of({"token_ids": IDS}, index=WHOLE, **said, logprobs=OBJECT_OR_NONE, finish_reason=ENDS)
    prompts = {"prompt_token_ids": {"anyOf": [IDS, each(IDS)]}}
    head = {"id": TEXT, "object": just(kind), "created": WHOLE, "model": TEXT}
    return object_of(prompts, **head, choices=each(choice), usage=USAGE)


RESPONSE: Schema = {
    **object_of(
        id=TEXT,
        object=just("response"),
        created_at=WHOLE,
        status=just("completed", "incomplete"),
        model=TEXT,
        output=each(
            object_of(
                id=TEXT,
                type=just("message"),
                role=just("assistant"),
                status=just("completed", "incomplete"),
                content=each(
                    object_of(type=just("output_text"), text=TEXT, annotations=each(ANYTHING), logprobs=each(ANYTHING))
                ),
            )
        ),
        usage=ANYTHING,
    ),
    "additionalProperties": True,  # it repeats what it was asked
}
MODEL = object_of(
    id=TEXT,
    object=just("model"),
    created=WHOLE,
    owned_by=TEXT,
    root=TEXT,
    parent=TEXT_OR_NONE,
    max_model_len=WHOLE,
)
ORDER = object_of(instance_id=TEXT, role=TEXT_OR_NONE)
OF: dict[str, Schema] = {
    "/v1/completions": generated("text_completion", {"text": TEXT}),
    "/v1/chat/completions": generated("chat.completion", {"message": MESSAGE}),
    "/v1/responses": RESPONSE,
    "/v1/models": object_of(object=just("list"), data=each(MODEL)),
    "/v1/models/{model}": MODEL,
    "/tokenize": object_of(
        count=WHOLE, max_model_len=WHOLE_OR_NONE, tokens=IDS, token_strs={"type": ["array", "null"], "items": TEXT}
    ),
    "/detokenize": object_of(prompt=TEXT),
    "/health": object_of(status=just("alive")),
    "/ready": object_of(status=just("ready"), instances=WHOLE),
    "/metrics": TEXT,
    "/version": object_of(version=TEXT),
    "/debug/overview": ANYTHING,
    "/debug/requests": object_of(requests=each(ANYTHING)),
    "/debug/requests/{request_id}": {"type": "object", "required": ["request_id"]},
    "/debug/instances": object_of(instances=each(ANYTHING)),
    "/admin/instances/{instance_id}/drain": ORDER,
    "/admin/instances/{instance_id}/role": ORDER,
}
STREAMED = {"/v1/completions", "/v1/chat/completions", "/v1/responses"}
