"""The parse server: functions run in processes beside the router, and end as they would in it."""

import json
import os
from collections.abc import Callable
from typing import Any

# In a process of its own: a router forks its parse server while it has one thread.
SCRIPT = """
import json, os, signal, sys, threading
sys.modules["torch"] = None  # as `pdserve router` does
from functools import partial
from pdserve.errors import BadRequest, InvalidParameter, RequestError
from pdserve.router.api.parsing import UnknownFields, parse_body
from pdserve.router.api.schemas import TokenizeBody
from pdserve.router.text.tokenizer import Tokenizer
from pdserve.router.parse_server import LARGE, ParseServer

def same(tokenizer): return tokenizer, tokenizer.parsers
def raised(error): raise error
def nested(depth): return nested(depth + 1)
def end(): os.kill(os.getpid(), signal.SIGKILL)

def outcome(function, *arguments):
    try:
        return server.run(partial(function, *arguments))
    except (RequestError, RecursionError) as error:
        return {"type": type(error).__name__, "message": str(error)[:60], **vars(error)}

tokenizer, found, ignored = Tokenizer("demo"), {}, []
with ParseServer(tokenizer) as server:
    server.on_ignored = ignored.append
    pid = server.run(os.getpid)
    found["beside"] = pid not in (os.getpid(), server.pid) and pid == server.run(os.getpid)
    found["session"] = server.run(partial(os.getsid, 0)) == server.pid
    found["niceness"] = server.run(partial(os.nice, 0)) - os.nice(0)
    copies = server.run(partial(same, tokenizer))
    found["shared"] = copies[0] is tokenizer and copies[1] is tokenizer.parsers
    found["errors"] = [
        outcome(raised, BadRequest("no", kind="k", param="p", retry_after_s=3)),
        outcome(raised, InvalidParameter("field", "is wrong")),
        outcome(nested, 0),
        outcome(raised, ValueError("a defect")),
    ]
    parse = partial(UnknownFields().without, b'{"prompt": "a", "x": 1, "y": 2}', partial(parse_body, TokenizeBody))
    found["body"] = server.run(parse).prompt
    found["ignored"] = sum(ignored)
    other_thread = []
    thread = threading.Thread(target=lambda: other_thread.append(server.run(os.getpid)))
    thread.start()
    thread.join()
    found["of_thread"] = other_thread != [pid]
    server.run(partial(len, bytes(LARGE)))
    found["memory_returned"] = server.run(os.getpid) != pid
    pid = server.run(os.getpid)
    found["ended"] = outcome(end)
    found["again"] = server.run(os.getpid) != pid
try:
    os.kill(server.pid, 0)
except ProcessLookupError:
    found["is_gone"] = True
print(json.dumps(found))
"""


def test_functions_run_beside_the_router(pdserve: Callable[..., Any]) -> None:
    done = pdserve("-c", SCRIPT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    refused = {"kind": "k", "param": "p", "retry_after_s": 3}
    no_field = {"param": None, "retry_after_s": None}
    internal = {"type": "InternalError", "kind": "internal_error", **no_field}
    errors = found.pop("errors")
    assert errors == [
        {"type": "BadRequest", "message": "no", **refused},
        {"type": "InvalidParameter", "message": "is wrong", "kind": "invalid_parameter", "param": "field"}
        | {"retry_after_s": None},
        {"type": "RecursionError", "message": "maximum recursion depth exceeded"},
        internal | {"message": errors[3]["message"]},
    ]
    assert "a defect" in done.stderr, "the traceback is logged"
    ended = {"type": "RequestError", "kind": "internal_error", **no_field}
    assert found.pop("ended") == ended | {"message": "the process that parsed the body has ended"}
    assert found.pop("niceness") == min(10, 19 - os.nice(0)), "running requests come first"
    assert found.pop("session"), "whose niceness counts against others"
    assert found == {"body": "a", "ignored": 2} | dict.fromkeys(
        ("beside", "shared", "of_thread", "memory_returned", "again", "is_gone"), True
    )


def test_it_ends_where_ended_children_are_reaped_by_the_kernel(pdserve: Callable[..., Any]) -> None:
    code = """
import signal
from pdserve.router.parse_server import ParseServer
from pdserve.router.text.tokenizer import Tokenizer
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # as a router may inherit it
with ParseServer(Tokenizer("demo")):
    pass
"""
    done = pdserve("-c", code)
    assert (done.returncode, done.stderr) == (0, "")
