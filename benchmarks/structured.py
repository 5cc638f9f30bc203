"""Answers by JSON schemas, all of which must be valid, and what they cost: `python benchmarks/structured.py`.

A router, a prefill and a decode instance run the demo model. Each request has a schema of its own, drawn at random: nested
objects, lists, enums, constants, patterns, bounded numbers, and lists that are defined by recursion. The same requests run
when their schemas are new to the deployment, again, and without schemas, with as many tokens each. `jsonschema` checks every
answer. A frequency penalty ends the recursive lists, which the small model would go on with for ever.
"""

import asyncio
import json
import random
import time
from dataclasses import dataclass
from typing import Any

import httpx
import jsonschema
import report

from pdserve.cli.deployment import Deployment, free_port
from pdserve.cli.flags import command_from_config
from pdserve.config import UpConfig, flag


@dataclass(frozen=True, kw_only=True)
class Settings(report.Settings):
    requests: int = flag("each with a schema of its own", 1000)
    concurrency: int = flag("requests at once", 8)
    max_tokens: int = flag("of an answer; one that reaches them is not valid", 1000)
    seed: int = flag("of the schemas", 0)


QUICK = {"requests": 6}
PATTERNS = (
    "^[a-z]{2,6}$",
    "^[A-Z]{2}-[0-9]{3}$",
    "^(\\+[0-9]{1,3} )?[0-9]{4}$",
    "^(red|green|blue)(, (red|green|blue))?$",
)
RECURSIVE: dict[str, Any] = {
    "type": "object",
    "properties": {"value": {}, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
}
WORDS = ("name", "city", "age", "tags", "price", "parts", "owner", "state")


def benchmark(settings: Settings) -> None:
    """Answer requests with schemas and without, and check each answer against its schema."""
    settings = settings.sized(QUICK)
    drawn = random.Random(settings.seed)
    schemas = [schema(drawn) for _ in range(settings.requests)]
    with Deployment(UpConfig(port=free_port(), threads=1, kv_cache_memory="256MiB"), lambda _: None) as deployment:
        deployment.wait_ready()
        first, answers = asyncio.run(_run(deployment.url, settings, schemas, None))
        again, repeated = asyncio.run(_run(deployment.url, settings, schemas, None))
        lengths = [answer["usage"]["completion_tokens"] for answer in answers]
        plain, _ = asyncio.run(_run(deployment.url, settings, schemas, lengths))
    rows = [{"answers": name, **row} for name, row in (("new schemas", first), ("again", again), ("without", plain))]
    faults = [fault for one, answer in zip(schemas, answers, strict=True) if (fault := _fault(one, answer))]
    kinds = {
        kind: sum(f'"{kind}"' in json.dumps(one) for one in schemas) for kind in ("enum", "pattern", "$ref", "items")
    }
    report.show([row | {"of without": f"{row['tokens_per_s'] / plain['tokens_per_s']:.2f}"} for row in rows])
    same = sum(_text(one) == _text(other) for one, other in zip(answers, repeated, strict=True))
    print(f"{len(answers) - len(faults)} of {len(answers)} valid, {same} the same again; schemas with {kinds}")
    for fault in faults[:5]:
        print(fault)
    valid = len(answers) - len(faults)
    print(
        report.write("structured", settings, {"rows": rows, "valid": valid, "same_again": same, "schemas_with": kinds})
    )


def schema(drawn: random.Random) -> dict[str, Any]:
    """Return a random schema of an object."""
    definitions: dict[str, Any] = {}
    root = _object(drawn, 3, definitions)
    return {**root, "$defs": definitions} if definitions else root


def _object(drawn: random.Random, depth: int, definitions: dict[str, Any]) -> dict[str, Any]:
    names = drawn.sample(WORDS, drawn.randint(1, 4))
    properties = {name: _value(drawn, depth - 1, definitions) for name in names}
    required = names[: drawn.randint(1, len(names))]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _value(drawn: random.Random, depth: int, definitions: dict[str, Any]) -> dict[str, Any]:
    kinds = ["enum", "const", "pattern", "integer", "boolean", "string"]
    match drawn.choice(kinds + ["object", "list", "recursion"] * (depth > 0)):
        case "object":
            return _object(drawn, depth, definitions)
        case "list":
            return {"type": "array", "items": _value(drawn, depth - 1, definitions), "minItems": 1, "maxItems": 3}
        case "recursion":
            if "node" not in definitions:
                properties = {**RECURSIVE["properties"], "value": _value(drawn, 0, definitions)}
                definitions["node"] = {
                    **RECURSIVE,
                    "properties": properties,
                    "required": ["value", "next"],
                    "additionalProperties": False,
                }
            return {"$ref": "#/$defs/node"}
        case "enum":
            return {"enum": drawn.sample(["red", "green", "blue", 1, 2, None, True], drawn.randint(2, 5))}
        case "const":
            return {"const": drawn.choice(["fixed", 7, False])}
        case "pattern":
            return {"type": "string", "pattern": drawn.choice(PATTERNS)}
        case "integer":
            low = drawn.randint(-100, 100)
            return {"type": "integer", "minimum": low, "maximum": low + drawn.randint(0, 1000)}
        case "boolean":
            return {"type": "boolean"}
    return {"type": "string", "maxLength": drawn.randint(1, 12)}


async def _run(
    url: str, settings: Settings, schemas: list[dict[str, Any]], lengths: list[int] | None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the figures of a run and its answers; with `lengths`, answers have so many tokens and no schema."""
    places = asyncio.Semaphore(settings.concurrency)

    async def ask(http: httpx.AsyncClient, number: int) -> dict[str, Any]:
        body: dict[str, Any] = {"prompt": f"Request {number}, as JSON:", "seed": number, "frequency_penalty": 0.5}
        if lengths is None:
            wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schemas[number]}}
            body |= {"max_tokens": settings.max_tokens, "response_format": wanted}
        else:
            body |= {"max_tokens": lengths[number], "ignore_eos": True}
        async with places:
            reply = await http.post("/v1/completions", json=body)
        found: dict[str, Any] = reply.raise_for_status().json()
        return found

    async with httpx.AsyncClient(base_url=url, timeout=600) as http:
        started = time.perf_counter()
        answers = await asyncio.gather(*(ask(http, number) for number in range(len(schemas))))
        seconds = time.perf_counter() - started
    tokens = sum(answer["usage"]["completion_tokens"] for answer in answers)
    rates = {
        "requests_per_s": report.rounded(len(answers) / seconds, 3),
        "tokens_per_s": report.rounded(tokens / seconds, 3),
    }
    return {"seconds": round(seconds, 2), "tokens": tokens, **rates}, answers


def _text(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["text"])


def _fault(wanted: dict[str, Any], answer: dict[str, Any]) -> str:
    """Return why an answer is not valid; empty if it is."""
    if answer["choices"][0]["finish_reason"] != "stop":
        return f"not complete after {answer['usage']['completion_tokens']} tokens: {_text(answer)[-100:]!r}"
    try:
        jsonschema.validate(json.loads(_text(answer)), wanted)
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{_text(answer)[:200]!r}: {str(error).splitlines()[0]}"
    return ""


if __name__ == "__main__":
    report.main(command_from_config(Settings, benchmark))
