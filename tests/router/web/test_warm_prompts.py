"""Files of warm prompts: those that cannot be used are errors at the start, and what instances are sent of the others."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from pdserve.errors import SetupError
from pdserve.proto import pdserve_pb2 as pb
from pdserve.request import PIN_SINCE, Request
from pdserve.router.backend import ModelInfo
from pdserve.router.limits.key_file import ANONYMOUS, load_api_keys
from pdserve.router.web.warm_prompts import WarmPrompts, read_warm_prompts


def test_lines_are_strings_or_bodies(tmp_path: Path) -> None:
    path = tmp_path / "warm.jsonl"
    path.write_text('"a"\n\n{"prompt": [1, 2]}\n{"messages": []}\n')
    assert read_warm_prompts(str(path), []) == [(1, {"prompt": "a"}), (3, {"prompt": [1, 2]}), (4, {"messages": []})]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('"a"\n{"input": "b"}', "line 2: write a string, or an object with messages or prompt"),
        ("[1, 2]", "line 1: write a string"),
        ("{", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
    ],
)
def test_other_lines_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "warm.jsonl"
    path.write_text(text)
    with pytest.raises(SetupError, match=message):
        read_warm_prompts(str(path), [])


def test_keys_with_kv_of_their_own_could_not_use_them(tmp_path: Path) -> None:
    path, keys = tmp_path / "warm.jsonl", tmp_path / "keys.toml"
    path.write_text('"a"')
    keys.write_text("".join(f'[{name}]\nkey = "{name * 16}"\n' for name in "ab"))
    assert read_warm_prompts(str(path), load_api_keys("", str(keys), share_kv=True))
    with pytest.raises(SetupError, match="--warm-prompts need --share-kv"):
        read_warm_prompts(str(path), load_api_keys("", str(keys)))
    with pytest.raises(SetupError, match=r"cannot be read: No such file or directory$"):
        read_warm_prompts(str(tmp_path / "none"), [])


def attached(name: str, version: int = PIN_SINCE) -> Any:
    hello, frames = pb.Hello(protocol_version=version), list[pb.RouterFrame]()
    return Mock(id=name, hello=hello, frames=frames, connection=SimpleNamespace(send=frames.append))


async def keep_warm(bodies: list[Any], *groups: list[Any]) -> None:
    """Let groups of instances attach, each when the one before has got its prompts."""
    fleet = SimpleNamespace(instances={}, cache_epoch=0)
    model = ModelInfo("demo", 100, 100, 256, frozenset([0]), b"digest", frozenset([16]))
    dispatcher, admission = SimpleNamespace(fleet=fleet, model=model), SimpleNamespace(kv_salts={ANONYMOUS: ""})
    warm = WarmPrompts(bodies, cast(Any, None), cast(Any, dispatcher), cast(Any, admission))
    task = asyncio.create_task(warm.run())
    for group in groups:
        fleet.instances |= {one.id: one for one in group}
        while not (task.done() or all(one.frames for one in group)):
            await asyncio.sleep(0.01)
    task.cancel()


def test_an_instance_of_an_older_version_computes_the_prompts_and_does_not_pin_them() -> None:
    """It refuses a request with a field that it does not know."""
    instances = [attached("old", PIN_SINCE - 1), attached("new")]
    asyncio.run(keep_warm([(1, {"prompt": [1, 2]})], instances))
    sent = [Request.unpack(frame.submit.request) for one in instances for frame in one.frames]
    assert [(list(one.prompt), one.pin) for one in sent] == [([1, 2], False), ([1, 2], True)]


def test_a_line_that_cannot_be_used_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """And not with each instance that attaches."""
    bodies = [(1, {"prompt": [1, 2]}), (2, {"prompt": [999]})]
    asyncio.run(keep_warm(bodies, [attached("first")], [attached("second")]))
    assert [one.getMessage().partition(":")[0] for one in caplog.records] == ["--warm-prompts, line 2"]
