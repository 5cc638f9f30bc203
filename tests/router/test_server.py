"""The router process."""

import pytest

from pdserve.config import RouterConfig
from pdserve.router.dispatch.dispatcher import Dispatcher
from pdserve.router.server import serve


def test_router_exits_if_a_background_task_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its tasks it would serve on, without timeouts."""

    def fail(_: Dispatcher) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Dispatcher, "check_progress", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        serve(RouterConfig(model="demo", port=0, control_port=0))
