"""Start-up, change of role and the router's share, measured on real processes."""

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from pdserve.cli.deployment import Deployment, free_port
from pdserve.config import UpConfig
from pdserve.errors import SetupError
from pdserve.profile.profile import EngineFacts, Profile, StepModel
from pdserve.tools.profiling import deployment

TINY = StepModel(decode=((1, 1e-6),), prefill=((2, 1e-6), (256, 2e-6)))


@pytest.mark.long
@pytest.mark.integration
def test_what_surrounds_the_engine_is_measured(fork_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployment, "REQUESTS", 3)
    monkeypatch.setattr(deployment, "ROUNDS", 1)
    monkeypatch.setattr(deployment, "SERVED", 1)
    for name in ("PDSERVE_API_KEY", "PDSERVE_ADMIN_KEY"):
        monkeypatch.setenv(name, "of another deployment")
    lines: list[str] = []

    class Forked(Deployment):
        def _spawn(self, arguments: list[str], environment: dict[str, str]) -> Any:
            return fork_server.spawn(arguments, environment)

    def start(instances: int) -> AbstractContextManager[Any]:
        settings = UpConfig(prefill=0, decode=0, both=instances, threads=1, num_blocks=64, port=free_port())
        return Forked(settings, on_line=lines.append)

    before = Profile(model="demo", engine=EngineFacts(max_model_len=512), step=TINY)
    after = deployment.measure(start, before)
    assert after.start_up_s != before.start_up_s and after.role_flip_s != before.role_flip_s
    around = after.overheads
    assert around.router_request_s + around.router_token_s > 0 and 0 < around.frame_s != before.overheads.frame_s
    assert after.step.decode_seconds(1, 1) > before.step.decode_seconds(1, 1), "an instance takes longer than nothing"
    assert after.step.seconds([(100, 0)]) > before.step.seconds([(100, 0)])
    changes = [line for line in lines if line.startswith("[both-0]") and "now serves as decode" in line]
    assert len(changes) == 2, lines


def test_an_instance_that_dies_as_it_changes_its_role_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"instances": []})

    served = httpx.Client(transport=httpx.MockTransport(answer), base_url="http://router")
    running = SimpleNamespace(wait_ready=lambda: None, url="http://router")
    monkeypatch.setattr(deployment, "FLIP_TIMEOUT_S", 0.1)
    for name in ("measure_router", "_as_served"):
        monkeypatch.setattr(deployment, name, lambda _, profile: profile)
    monkeypatch.setattr(httpx, "Client", lambda **_: served)
    with pytest.raises(SetupError, match="both-0 does not serve as decode within"):
        deployment.measure(lambda _: nullcontext(running), Profile(model="demo"))
