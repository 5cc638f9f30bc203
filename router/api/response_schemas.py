"""JSON schemas of the responses, for /openapi.json.

A required property is in every response, and an object has no properties beyond those listed, unless it says otherwise.
"""

from typing import Any

Schema = dict[str, Any]
TEXT, INTEGER = ({"type": kind} for kind in ("string", "integer"))
TEXT_OR_NONE, INTEGER_OR_NONE = ({"type": [kind, "null"]} for kind in ("string", "integer"))
ANY_OBJECT: Schema = {"type": "object"}
OBJECT_OR_NONE: Schema = {"type": ["object", "null"]}


def array_of(item: Schema) -> Schema:
    return {"type": "array", "items": item}


def enum_of(*values: str) -> Schema:
    return {"enum": list(values)}


def object_of(optional: Schema | None = None, **properties: Schema) -> Schema:
    """Return the schema of an object with these required properties, the `optional` ones, and no others."""
    return {
        "type": "object",
        "required": list(properties),
        "properties": {**properties, **(optional or {})},
        "additionalProperties": False,
    }


ERROR = object_of(error=object_of(message=TEXT, type=TEXT, param=TEXT_OR_NONE, code=TEXT))
IDS = array_of(INTEGER)
USAGE = object_of(
    prompt_tokens=INTEGER,
    completion_tokens=INTEGER,
    total_tokens=INTEGER,
    prompt_tokens_details=object_of(cached_tokens=INTEGER),
)
CALL = object_of(id=TEXT, type=enum_of("function"), function=object_of(name=TEXT, arguments=TEXT))
MESSAGE = object_of(
    {"tool_calls": array_of(CALL)}, role=enum_of("assistant"), content=TEXT_OR_NONE, refusal={"type": "null"}
)
FINISH_REASON = enum_of("stop", "length", "tool_calls")


def completion_schema(kind: str, content: dict[str, Schema]) -> Schema:
    """Return the schema of a completion or a chat completion; `content` are the properties that hold a choice's text."""
    choice = object_of(
        {"token_ids": IDS}, index=INTEGER, **content, logprobs=OBJECT_OR_NONE, finish_reason=FINISH_REASON
    )
    prompts = {"prompt_token_ids": {"anyOf": [IDS, array_of(IDS)]}}
    head = {"id": TEXT, "object": enum_of(kind), "created": INTEGER, "model": TEXT}
    return object_of(prompts, **head, choices=array_of(choice), usage=USAGE)


RESPONSE: Schema = {
    **object_of(
        id=TEXT,
        object=enum_of("response"),
        created_at=INTEGER,
        status=enum_of("completed", "incomplete"),
        model=TEXT,
        output=array_of(
            object_of(
                id=TEXT,
                type=enum_of("message"),
                role=enum_of("assistant"),
                status=enum_of("completed", "incomplete"),
                content=array_of(
                    object_of(
                        type=enum_of("output_text"),
                        text=TEXT,
                        annotations=array_of(ANY_OBJECT),
                        logprobs=array_of(ANY_OBJECT),
                    )
                ),
            )
        ),
        usage=ANY_OBJECT,
    ),
    "additionalProperties": True,  # the response repeats fields of its request
}
MODEL = object_of(
    id=TEXT,
    object=enum_of("model"),
    created=INTEGER,
    owned_by=TEXT,
    root=TEXT,
    parent=TEXT_OR_NONE,
    max_model_len=INTEGER,
)
ADMIN_RESULT = object_of(instance_id=TEXT, role=TEXT_OR_NONE)
BY_PATH: dict[str, Schema] = {
    "/v1/completions": completion_schema("text_completion", {"text": TEXT}),
    "/v1/chat/completions": completion_schema("chat.completion", {"message": MESSAGE}),
    "/v1/responses": RESPONSE,
    "/v1/models": object_of(object=enum_of("list"), data=array_of(MODEL)),
    "/v1/models/{model}": MODEL,
    "/tokenize": object_of(
        count=INTEGER, max_model_len=INTEGER_OR_NONE, tokens=IDS, token_strs={"type": ["array", "null"], "items": TEXT}
    ),
    "/detokenize": object_of(prompt=TEXT),
    "/health": object_of(status=enum_of("alive")),
    "/ready": object_of(status=enum_of("ready"), instances=INTEGER),
    "/metrics": TEXT,
    "/version": object_of(version=TEXT),
    "/debug/overview": ANY_OBJECT,
    "/debug/requests": object_of(requests=array_of(ANY_OBJECT)),
    "/debug/requests/{request_id}": {"type": "object", "required": ["request_id"]},
    "/debug/instances": object_of(instances=array_of(ANY_OBJECT)),
    "/admin/instances/{instance_id}/drain": ADMIN_RESULT,
    "/admin/instances/{instance_id}/role": ADMIN_RESULT,
}
STREAMING_PATHS = {"/v1/completions", "/v1/chat/completions", "/v1/responses"}
