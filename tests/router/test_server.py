"""The router process."""

from collections.abc import Callable
from typing import Any

# In a process of its own: a router forks its parse server while it has one thread.
SERVE = """
import sys
sys.modules["torch"] = None  # as `pdserve router` does
from pdserve.config import RouterConfig
from pdserve.router.dispatch.dispatcher import Dispatcher
from pdserve.router.server import serve

def fail(_):
    raise RuntimeError("a bug")

Dispatcher.check_progress = fail
serve(RouterConfig(model="demo", port=0, control_port=0))
"""


def test_router_exits_if_a_background_task_fails(pdserve: Callable[..., Any]) -> None:
    """Without its tasks it would serve on, without timeouts."""
    ended = pdserve("-c", SERVE)
    assert ended.returncode == 1 and ended.stderr.rstrip().endswith("RuntimeError: a bug"), ended.stderr
