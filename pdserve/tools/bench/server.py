"""Queries to a server besides the load: its models, and the timelines of requests where the server is ours."""

import re
import statistics
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import httpx

from pdserve.admin_client import DIRECT, admin_headers
from pdserve.errors import SetupError
from pdserve.lines.untrusted import read_json
from pdserve.tools.bench.requests import Sample

TIMELINES = 200  # requests whose timelines are read, spread over the run
DRAFTS = re.compile(
    r"^pdserve_spec_decode_num_(drafts|draft_tokens|accepted_tokens)_total(?:{.*})? (\S+)$", re.M | re.ASCII
)
PARTS = {  # of a timeline: the stages at which a part begins and ends
    "queue": ("received", "prefill_started"),
    "prefill": ("prefill_started", "first_token"),
    "hand_over": ("first_token", "decode_started"),
}


def find_model(url: str, headers: httpx.Headers, wanted: str) -> dict[str, Any]:
    """Return the entry of a model in /v1/models, the first if none is wanted; only its id if the server has no list.

    Raises:
        SetupError: the server does not respond or has no such model.
    """
    try:
        with httpx.Client(headers=headers, timeout=30.0, mounts=DIRECT) as http:
            answer = http.get(f"{url}/v1/models")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise SetupError(f"{url} does not respond: {error}; name the server with --base-url") from None
    if answer.status_code == 404 and wanted:
        return {"id": wanted}
    if answer.status_code != 200:
        raise SetupError(f"{url}/v1/models answers {answer.status_code}: {answer.text[:200].strip()}")
    try:
        models: list[dict[str, Any]] = [{"id": one["id"], **one} for one in read_json(answer.content)["data"]]
    except (ValueError, KeyError, TypeError):
        raise SetupError(f"{url}/v1/models does not answer with a list of models") from None
    for model in models:
        if wanted in ("", model["id"]):
            return model
    names = ", ".join(model["id"] for model in models) or "none"
    raise SetupError(f"{url} has no model {wanted!r}; it has {names}" if wanted else f"{url} serves no model yet")


def _operators_client() -> httpx.Client:
    """Return a client with the admin key, or with none if that cannot be sent: what it asks for is not worth an error."""
    headers = httpx.Headers()
    with suppress(SetupError):
        headers = admin_headers()
    return httpx.Client(headers=headers, timeout=30.0, mounts=DIRECT)


def read_drafts(url: str) -> Counter[str]:
    """Return how many drafts, draft_tokens and accepted_tokens a server has counted so far, if it is ours."""
    try:
        with _operators_client() as http:
            answer = http.get(f"{url}/metrics")
    except httpx.HTTPError:
        return Counter()
    found = Counter[str]()
    for name, value in DRAFTS.findall(answer.text if answer.status_code == 200 else ""):
        found[name] += int(float(value))
    return found


def acceptance(before: Counter[str], after: Counter[str]) -> dict[str, Any] | None:
    """Return what became of the drafts between two readings, under vLLM's names; None if there were none."""
    drafts, proposed, accepted = (after[name] - before[name] for name in ("drafts", "draft_tokens", "accepted_tokens"))
    if drafts <= 0 or proposed <= 0:
        return None
    return {
        "spec_decode_acceptance_rate": 100 * accepted / proposed,
        "spec_decode_acceptance_length": 1 + accepted / drafts,
        "spec_decode_num_drafts": drafts,
        "spec_decode_draft_tokens": proposed,
        "spec_decode_accepted_tokens": accepted,
    }


def read_breakdown(url: str, samples: Sequence[Sample]) -> dict[str, Any] | None:
    """Return the parts of TTFT in milliseconds, and the hand-over after it, by the router's timelines; None without them.

    The router keeps those of its latest requests only (`--timelines`).
    """
    done = [sample for sample in samples if sample.ok]
    parts: dict[str, list[float]] = {}
    with _operators_client() as http:
        for sample in done[:: max(1, len(done) // TIMELINES)]:
            try:
                answer = http.get(f"{url}/debug/requests/{sample.request_id}")
                stages: dict[str, float] = read_json(answer.content)["stages_ms"] if answer.status_code == 200 else {}
            except (httpx.HTTPError, ValueError, KeyError, TypeError):
                return None
            if answer.status_code in (401, 403):
                return None
            if "first_token" in stages:
                inside = stages["first_token"] - stages.get("received", 0.0)
                parts.setdefault("outside_router", []).append(max(0.0, sample.ttft * 1e3 - inside))
            for name, (begin, end) in PARTS.items():
                if begin in stages and end in stages and stages[end] >= stages[begin]:  # decode computed the prompt
                    parts.setdefault(name, []).append(stages[end] - stages[begin])
    if not parts:
        return None
    return {
        "requests": len(parts["outside_router"]),
        **{f"mean_{name}_ms": statistics.fmean(values) for name, values in parts.items()},
        **{f"median_{name}_ms": statistics.median(values) for name, values in parts.items()},
    }
