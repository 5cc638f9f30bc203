"""SLOs by prompt length and API key: the file, its mistakes, and what a plan makes of groups."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import SetupError
from pdserve.tools.bench.requests import Request, Sample
from pdserve.tools.planner.search import judge
from pdserve.tools.planner.slo_file import check_groups, load_targets
from pdserve.tools.planner.targets import ALL, Group, Target, attainment
from pdserve.tools.simulator.fleet import Fleet, Forecast

SHORT, CHAT = Group(0, 1000), Group(key="chat")


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], str]:
    def make(text: str) -> str:
        path = tmp_path / "slo.toml"
        path.write_text(text)
        return str(path)

    return make


def sample(tokens: int, key: str, ttft: float, itl: float = 0.01) -> Sample:
    times = [ttft + itl * number for number in range(3)]
    return Sample(0, 0.0, 0.0, 0.0, times[-1], times, tokens, 3, 200, key=key)


def test_a_file_has_targets_of_all_requests_and_of_groups(write: Callable[[str], str]) -> None:
    path = write(
        'slo = "itl.p99=50ms"\n[[group]]\nprompt_tokens = "..1000"\nslo = "ttft.p90=300ms,tpot.p95=1s"\n'
        '[[group]]\nkey = "chat"\nprompt_tokens = "4001.."\nslo = "ttft=2s"\n'
    )
    long_chat = Group(4001, key="chat")
    assert load_targets("ttft.p90=1s", path) == [
        Target("ttft", 90, 1.0),
        Target("itl", 99, 0.05),
        Target("ttft", 90, 0.3, SHORT),
        Target("tpot", 95, 1.0, SHORT),
        Target("ttft", 99, 2.0, long_chat),
    ]
    assert str(long_chat) == "key chat, prompts of 4001 or more tokens"
    assert str(Target("ttft", 90, 0.3, SHORT)) == "TTFT p90 (prompts of 0 to 1000 tokens)"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("slo = x", "slo.toml is not TOML: Invalid value (at line 1"),
        ("slo = " + "[" * 100_000, "slo.toml is not TOML: it is nested too deeply"),
        ("goal = 3", "there is no field goal"),
        ("", "slo.toml has no target"),
        ("slo = 5", "slo.toml, slo: '5' is no objective"),
        ("[group]\nkey = 'a'", "write [[group]] in place of [group]"),
        ("group = [3]", "group 1 is no table"),
        ("[[group]]\nkey = 'a'", "group 1, slo: there is no target"),
        ("[[group]]\nkeys = 'a'", "group 1: there is no field keys; there are prompt_tokens, key, slo"),
        ("[[group]]\nslo = 'ttft=1s'", "group 1 is of all requests"),
        ("[[group]]\nprompt_tokens = '9..3'", "group 1, prompt_tokens: '9..3' is no range"),
        ("[[group]]\nprompt_tokens = 9", "group 1, prompt_tokens: 9 is no range"),
        ("[[group]]\nkey = 'a'\nslo = 'ttft=1s'\n" * 2, "TTFT p99 (key a) has two targets"),
    ],
)
def test_mistakes_name_the_place(write: Callable[[str], str], text: str, expected: str) -> None:
    with pytest.raises(SetupError) as caught:
        load_targets("", write(text))
    assert expected in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("group", "requests", "expected"),
    [
        (CHAT, [Request(0, 1)], "the load has no API keys"),
        (CHAT, [Request(0, 1, key="batch")], "no request has it; the load has batch"),
        (SHORT, [Request(0, 1, input_tokens=1001)], "no request of the load is of this group"),
    ],
)
def test_a_group_without_requests_is_an_error(group: Group, requests: list[Request], expected: str) -> None:
    with pytest.raises(SetupError, match=expected):
        check_groups([Target("ttft", 90, 1.0, group)], requests)
    check_groups([Target("ttft", 90, 1.0, group)], [*requests, Request(1, 1, input_tokens=5, key="chat")])


def test_the_verdict_names_the_group_that_binds() -> None:
    targets = [Target("ttft", 90, 1.0), Target("ttft", 90, 0.4, SHORT), Target("itl", 99, 0.05, CHAT)]
    samples = [sample(500, "batch", 0.6), sample(5000, "chat", 0.9, 0.04)]
    forecast = Forecast(Fleet(1, 1), {"p90_ttft_ms": 870.0, "failed": 0}, {}, 0, False, samples)
    trial = judge(targets, forecast)
    assert trial.binding == targets[1] and trial.ratio == pytest.approx(1.5)
    assert [trial.values[one] for one in targets] == pytest.approx([0.87, 0.6, 0.04])
    assert trial.attainment == 0.5 and trial.forecast.samples == []


def test_attainment_asks_the_targets_of_a_request_only() -> None:
    targets = [Target("ttft", 50, 0.1), Target("ttft", 99, 0.5), Target("ttft", 90, 0.2, CHAT)]
    samples = [sample(1, "", 0.4), sample(1, "chat", 0.4), sample(1, "chat", 0.1), sample(1, "", 0.6)]
    assert attainment(targets, samples) == 0.5
    assert attainment(targets, []) == 0.0 and ALL.admits(7, "any")


def test_a_plan_by_groups(tiny_profile: Path, write: Callable[[str], str], pdserve: Callable[..., Any]) -> None:
    trace = tiny_profile.parent / "trace.csv"
    rows = [f"2024-01-01 00:00:{n:02},{100 + 2000 * (n % 2)},20,{'chat' if n % 2 else 'batch'}" for n in range(30)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens,key", *rows]))
    path = write(
        '[[group]]\nprompt_tokens = "..1000"\nslo = "ttft.p90=2s"\n[[group]]\nkey = "chat"\nslo = "ttft.p90=100ms"'
    )
    arguments = ["plan", "--profile", tiny_profile, "--dataset-name", "azure", "--dataset-path", trace, "--jobs", 1]
    out = tiny_profile.parent / "plan.json"
    done = pdserve(*map(str, [*arguments, "--slo-file", path, "--max-instances", 2, "--json", out]))
    assert done.returncode == 3 and "What binds is TTFT p90 (key chat)" in done.stdout, done.stderr
    row = json.loads(out.read_text())["trials"][0]
    assert row["binding"] == "TTFT p90 (key chat)" and row["attainment"] == 0.5
