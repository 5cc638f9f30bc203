"""The SLO of a plan from a TOML file: targets of all requests, and of groups by prompt length or API key.

    slo = "ttft.p90=1s,itl.p99=50ms"     # of all requests

    [[group]]
    prompt_tokens = "..1000"             # also "1001..4000" and "4001.."
    slo = "ttft.p90=300ms"

    [[group]]
    key = "chat"                         # the column `key` of a trace
    slo = "ttft.p99=500ms,itl.p99=30ms"

All targets hold, those of all requests for the requests of groups too.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

from pdserve.errors import SetupError
from pdserve.lines.untrusted import read_toml
from pdserve.tools.bench.requests import Request
from pdserve.tools.planner.targets import ALL, Group, Target, parse_targets

FIELDS = ("prompt_tokens", "key", "slo")


def load_targets(slo: str, path: str) -> list[Target]:
    """Return the targets of `--slo` and those of `--slo-file`. Either may be empty.

    Raises:
        SetupError: both are empty, the file cannot be read, or a target is malformed or given twice.
    """
    targets: list[Target] = []
    if slo or not path:
        try:
            targets = parse_targets(slo)
        except ValueError as error:
            raise SetupError(f"--slo: {error}") from None
    if path:
        targets += _read(path)
    names = [str(one) for one in targets]
    if twice := next((name for number, name in enumerate(names) if name in names[:number]), None):
        raise SetupError(f"{path}: {twice} has two targets")
    return targets


def _read(path: str) -> list[Target]:
    try:
        with open(path, "rb") as file:
            content = read_toml(file.read())
    except OSError as error:
        raise SetupError(f"--slo-file {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise SetupError(f"{path} is not TOML: {error}") from None
    tables = content.get("group", [])
    if unknown := set(content) - {"slo", "group"}:
        raise SetupError(f"{path}: there is no field {min(unknown)}; there are slo, and tables [[group]]")
    if not isinstance(tables, list):
        raise SetupError(f"{path}: write [[group]] in place of [group]")
    targets = _parse(f"{path}, slo", ALL, content["slo"]) if "slo" in content else []
    for number, table in enumerate(tables, 1):
        place = f"{path}, group {number}"
        targets += _parse(f"{place}, slo", _parse_group(place, table), table.get("slo", ""))
    if not targets:
        raise SetupError(f"{path} has no target; write such as slo = 'ttft.p90=500ms'")
    return targets


def _parse(place: str, group: Group, slo: object) -> list[Target]:
    try:
        return parse_targets(str(slo), group)
    except ValueError as error:
        raise SetupError(f"{place}: {error}") from None


def _parse_group(place: str, table: Any) -> Group:
    if not isinstance(table, dict):
        raise SetupError(f"{place} is no table; write [[group]] above its fields")
    if unknown := set(table) - set(FIELDS):
        raise SetupError(f"{place}: there is no field {min(unknown)}; there are {', '.join(FIELDS)}")
    least, most = _parse_range(place, table["prompt_tokens"]) if "prompt_tokens" in table else (0, math.inf)
    group = Group(least, most, str(table.get("key", "")))
    if group == ALL:
        raise SetupError(f"{place} is of all requests; give prompt_tokens or key, or write its slo above the groups")
    return group


def _parse_range(place: str, text: object) -> tuple[int, float]:
    match = re.fullmatch(r"\s*(\d*)\s*\.\.\s*(\d*)\s*", str(text))
    least, most = (int(match[1] or 0), float(match[2] or math.inf)) if match else (1, 0.0)
    if least > most:
        raise SetupError(
            f"{place}, prompt_tokens: {text!r} is no range; write such as '..1000', '1001..4000', '4001..'"
        )
    return least, int(most) if math.isfinite(most) else most


def check_groups(targets: Sequence[Target], requests: Sequence[Request]) -> None:
    """Check that each group has requests.

    Raises:
        SetupError: one has none, so that its targets would be met by any fleet.
    """
    keys = sorted({request.key for request in requests} - {""})
    for group in dict.fromkeys(target.group for target in targets):
        if group.key and not keys:
            raise SetupError(
                f"the SLO of key {group.key}: the load has no API keys; they are a column or field `key` of a trace"
            )
        if group.key and group.key not in keys:
            raise SetupError(f"the SLO of key {group.key}: no request has it; the load has {', '.join(keys)}")
        grows = any(request.continues for request in requests)  # then lengths follow from the answers
        if not grows and not any(group.admits(request.input_tokens, request.key) for request in requests):
            raise SetupError(f"the SLO of {group}: no request of the load is of this group")
