"""One step of `pdserve autoscale`, with routers that the tests make up."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from pdserve.errors import SetupError
from pdserve.profile.profile import Profile
from pdserve.tools.autoscaler import command
from pdserve.tools.autoscaler.change import Change, MadeChange
from pdserve.tools.autoscaler.command import DecisionLog, step
from pdserve.tools.autoscaler.controller import Controller, Decision
from pdserve.tools.autoscaler.observation import Observation
from pdserve.tools.autoscaler.router_client import RouterClient
from pdserve.tools.load_config import AutoscaleConfig

CHANGE = Change("decode", "prefill")


@dataclass
class Steered:
    """A controller that always decides for `CHANGE`, and the routers that it asks."""

    on_lease: Callable[[str], str] = lambda decision: ""
    on_make: Callable[[], None] = lambda: None
    calls: list[str] = field(default_factory=list)
    changes: Sequence[MadeChange] = (MadeChange(0.0, "prefill", "decode", 1, 60.0),)

    def hold_lease(self, holder: str, seconds: float, decision: str = "", changes: Sequence[MadeChange] = ()) -> str:
        self.calls += ["remember"] * len(changes)
        return self.on_lease(decision)

    def recall(self, changes: Sequence[MadeChange]) -> None:
        assert changes == self.changes

    def observe(self, window: float) -> Observation:
        return Observation(0.0, (), ())

    def decide(self, seen: Observation) -> Decision:
        return Decision(0.0, {}, "too slow", change=CHANGE)

    def make(self, *_: Any) -> None:
        self.on_make()
        self.calls.append("make")

    def forget(self) -> None:
        self.calls.append("forget")

    def step(self, path: Path, *, apply: bool = True) -> None:
        client, controller = cast(RouterClient, self), cast(Controller, self)
        step(AutoscaleConfig(apply=apply), controller, client, "me", DecisionLog(str(path)), None)


def fail(*_: str) -> Any:
    raise SetupError("the router does not respond")


def fail_at_change(decision: str) -> str:
    return fail() if decision else ""


def test_a_change_is_made_or_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    made, advised, outdated = Steered(), Steered(), Steered(lambda decision: "another one holds it" if decision else "")
    made.step(path)
    advised.step(path, apply=False)
    outdated.step(path)
    assert (made.calls, advised.calls, outdated.calls) == (["make", "remember"], ["forget"], ["forget"])
    assert ['"made": true' in line for line in path.read_text().splitlines()] == [True, False]


@pytest.mark.parametrize("steered", [Steered(fail_at_change), Steered(on_make=fail)])
def test_a_change_that_fails_is_forgotten(steered: Steered, tmp_path: Path) -> None:
    """Otherwise the controller would wait for it until `--start-timeout`."""
    with pytest.raises(SetupError, match="does not respond"):
        steered.step(tmp_path / "decisions.jsonl")
    assert steered.calls == ["forget"] and not (tmp_path / "decisions.jsonl").read_text()


def test_a_defect_ends_one_step_and_not_the_controller(
    tiny_profile: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`pdserve up --autoscale` ends its fleet when its controller ends."""
    stop, steps = threading.Event(), list[int]()

    def fail_first(*_: object) -> None:
        steps.append(len(steps))
        if len(steps) == 1:
            raise ValueError("a pod in an unknown phase")
        stop.set()

    client = type("Client", (Steered,), {"close": lambda self: None})
    monkeypatch.setattr(command, "RouterClient", lambda *_: client())
    monkeypatch.setattr(command, "step", fail_first)
    config = AutoscaleConfig(profile=str(tiny_profile), slo="ttft.p90=1s", interval=0.01)
    thread = threading.Thread(target=command.run, args=(config, stop))  # a thread lowers only its own priority
    thread.start()
    thread.join(60)
    assert steps == [0, 1] and "a pod in an unknown phase" in caplog.text


def test_targets_of_an_api_key_are_refused(tiny_profile: Path) -> None:
    """Routers do not tell whose requests they had, so the targets would count as met."""
    slo = tiny_profile.parent / "slo.toml"
    slo.write_text('[[group]]\nkey = "chat"\nslo = "ttft=1ms"\n')
    config = AutoscaleConfig(profile=str(tiny_profile), slo_file=str(slo))
    with pytest.raises(SetupError, match=r"the SLO of key chat: routers do not tell .*; give targets by prompt_tokens"):
        command.make_controller(config, Profile.load(tiny_profile), can_start=False)
