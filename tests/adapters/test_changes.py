"""Adapters that an instance loads and unloads while it runs: what it announces, and what it refuses, in a sentence."""

import gc
import re
import shutil
import threading
import time
import tracemalloc
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from pdserve.adapters.checkpoint import CONFIG, WEIGHTS, Files, read_files
from pdserve.adapters.slots import NUM_RETIRED
from pdserve.config import InstanceConfig
from pdserve.instance.hello import make_hello
from pdserve.instance.instance import Instance
from pdserve.kv_transfer.connectors import memory
from pdserve.proto import pdserve_pb2 as pb
from pdserve.request import Request, SamplingParams
from tests.low_rank import make_adapter, with_settings

PATIENCE_S = 600


class Loader:
    """An instance whose orders a test gives.

    Attributes:
        announced: names and digests that it has announced.
    """

    def __init__(self, base: Path, folder: Path, connector: str = "memory://") -> None:
        self.answers: list[str] = []
        self.announced: list[dict[str, bytes]] = []
        self.config = InstanceConfig(
            model=str(base), served_model_name="base", connector=connector, num_blocks=64, lora_folder=str(folder)
        )
        self.instance = Instance(self.config, self._send)
        self.instance.on_adapters_changed = lambda found: self.announced.append({one.name: one.digest for one in found})

    def _send(self, link: str, frame: pb.InstanceFrame) -> None:
        assert frame.WhichOneof("frame") == "adapter_changed" and frame.adapter_changed.number == 7
        self.answers.append(frame.adapter_changed.error)

    @property
    def transfers(self) -> dict[str, float]:
        """Adapters stored and loaded, by direction and outcome."""
        self.instance.run_once(wait=False)
        counts = self.instance.reporter.counts.items()
        return {"/".join(re.findall('"(.*?)"', key)): one for key, one in counts if key.startswith("adapter_transfers")}

    def order(self, name: str, path: str, replaces: bool = False, **fields: Any) -> str:
        """Give an order, and return the error in its answer."""
        count, deadline = len(self.answers), time.monotonic() + PATIENCE_S
        order = pb.ChangeAdapter(number=7, name=name, path=path, replaces=replaces, **fields)
        self.instance.change_adapter("router", order)
        while len(self.answers) == count:
            assert time.monotonic() < deadline
            self.instance.run_once(wait=False)
            time.sleep(0.001)
        return self.answers[-1]


@pytest.fixture
def folder(checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    base, folder = checkpoint("llama", dtype="float32"), tmp_path / "adapters"
    make_adapter(folder / "good", base)
    with_settings(folder / "alpha", folder / "good", lora_alpha=40)
    make_adapter(folder / "high", base, rank=128, targets=("q_proj",))
    make_adapter(folder / "other", checkpoint("gpt2", dtype="float32"), targets=("c_attn",), transposed=True)
    shutil.copytree(folder / "good", folder / "short")
    data = (folder / "short" / WEIGHTS).read_bytes()
    (folder / "short" / WEIGHTS).write_bytes(data[:-100])
    shutil.copytree(folder / "good", folder / "deep")
    (folder / "deep" / CONFIG).write_text("[" * 100_000)
    shutil.copytree(folder / "good", tmp_path / "outside")
    (folder / "link").symlink_to(tmp_path / "outside")
    return folder


@pytest.fixture
def loader(checkpoint: Callable[..., Path], folder: Path) -> Iterator[Loader]:
    loader = Loader(checkpoint("llama", dtype="float32"), folder)
    yield loader
    loader.instance.close()


def test_load_replace_and_unload(loader: Loader) -> None:
    hello = make_hello("both", loader.config, loader.instance)
    assert hello.loads_adapters and not hello.adapters
    assert loader.order("sql", "good") == ""
    [first] = loader.announced
    assert loader.order("sql", "alpha", replaces=True) == ""
    assert loader.announced[1].keys() == {"sql", ""} and loader.announced[1][""] == first["sql"]
    assert loader.announced[1]["sql"] != first["sql"]
    assert loader.order("sql", "") == ""
    assert "sql" not in loader.announced[2]
    assert make_hello("both", loader.config, loader.instance).adapters


@pytest.mark.parametrize(
    ("name", "path", "message"),
    [
        (
            "x",
            "other",
            "is of another base: transformer.h.0.attn.c_attn maps 64 → 192, and here is no such linear layer",
        ),
        ("x", "high", "has rank 128, and --max-lora-rank is 64"),
        ("x", "short", "adapter_model.safetensors cannot be read"),
        ("x", "missing", "adapter_config.json cannot be read: No such file or directory"),
        ("x", "../outside", "../outside is outside of --lora-folder"),
        ("x", "link", "link is outside of --lora-folder"),
        ("x", "good\0", "cannot be read: ValueError"),
        ("x", "deep", "adapter_config.json cannot be read: it is nested too deeply"),
        ("base", "good", "'base' is the name of the model"),
        ("taken", "good", "the name 'taken' is taken"),
    ],
)
def test_orders_that_are_refused(loader: Loader, name: str, path: str, message: str) -> None:
    assert loader.order("taken", "alpha") == ""
    error = loader.order(name, path)
    assert message in error and "\n" not in error
    assert len(loader.announced) == 1


def test_an_adapter_that_is_unloaded_while_it_is_being_read_is_not_added(loader: Loader) -> None:
    for path in ("good", ""):  # both are there before anything is read
        loader.instance.change_adapter("router", pb.ChangeAdapter(number=7, name="sql", path=path))
    deadline = time.monotonic() + PATIENCE_S
    while len(loader.answers) < 2:
        assert time.monotonic() < deadline
        loader.instance.run_once(wait=False)
        time.sleep(0.001)
    assert loader.answers == ["", ""] and all("sql" not in one for one in loader.announced)
    assert loader.order("sql", "good") == "" and "sql" in loader.announced[-1]


def test_names_that_were_unloaded_take_no_memory(loader: Loader) -> None:
    adapters: Any = loader.instance.engine.adapters
    tracemalloc.start()
    try:
        for i in range(2000):
            adapters.change(pb.ChangeAdapter(name=f"{i:0500}"), loader.instance, loader.answers.append)
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert {*loader.answers} == {""} and grown < 100_000


def test_nothing_is_kept_of_adapters_that_have_come_and_gone(loader: Loader, folder: Path) -> None:
    """Of many, each loaded, replaced or unloaded: those with a name, some of the last without, and those in slots."""
    adapters: Any = loader.instance.engine.adapters
    threads, descriptors = threading.active_count(), len([*Path("/proc/self/fd").iterdir()])
    for alpha in range(1, 61):
        path = with_settings(folder / f"of {alpha}", folder / "good", lora_alpha=alpha)
        name = "sql" if alpha % 3 else f"other {alpha}"
        assert loader.order(name, path.name, replaces=True) == ""
        request = Request(
            prompt=[1, 2, 3], sampling=SamplingParams(max_tokens=1), adapter=adapters._names[name][0].digest
        )
        seq = loader.instance.engine.new_sequence("", request)
        assert adapters.acquire(seq)
        adapters.release(seq)
        if alpha % 3 == 0:
            assert loader.order(name, "") == ""
    del seq
    gc.collect()
    assert len(adapters._by_digest) <= loader.config.max_loras + NUM_RETIRED + 1
    assert threading.active_count() == threads and len([*Path("/proc/self/fd").iterdir()]) <= descriptors


def test_an_order_for_which_no_thread_can_be_started_is_refused(
    loader: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must not end the engine."""

    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        assert loader.order("sql", "good") == "'good' cannot be read: can't start new thread"
    assert loader.order("sql", "good") == ""


def test_earlier_weights_that_come_back_are_the_latest_of_their_name(loader: Loader) -> None:
    """Routers serve the latest of a name: an instance that was away must not bring the others back."""
    times = []
    for path in ("good", "alpha", "good"):
        assert loader.order("sql", path, replaces=True) == ""
        listed = make_hello("both", loader.config, loader.instance).adapters
        times += [one.loaded_at for one in listed if one.name == "sql"]
    assert times == sorted(set(times)) and len(times) == 3


def test_an_instance_without_the_folder(checkpoint: Callable[..., Path], folder: Path, tmp_path: Path) -> None:
    """It takes the adapter with a digest from the KV store, once another instance has stored it there, and nothing else."""
    base, store = checkpoint("llama", dtype="float32"), uuid.uuid4().hex
    url = f"memory://{store}?timeout=600"
    giver = Loader(base, folder, url)
    with_settings(tmp_path / "empty" / "sql", folder / "good", lora_alpha=3)
    taker = Loader(base, tmp_path / "empty", url)
    with closing(giver.instance), closing(taker.instance):
        assert giver.order("sql", "good") == ""
        digest = giver.announced[0]["sql"]
        for path, here in (("good", "cannot be read"), ("sql", "sql has other weights here"), ("/", "is outside of")):
            error = taker.order("sql", path, digest=digest)
            assert here in error and error.endswith("; adapter " + digest.hex() + ": the KV store does not have it")
        assert "is not here" in giver.order("", "", digest=bytes(16), offers=True)
        assert "is not here" in taker.order("", "", digest=digest, offers=True)
        assert giver.order("", "", digest=digest, offers=True) == ""
        assert taker.order("base", "good", digest=digest) == "'base' is the name of the model"

        values = memory._stores[store].values
        name = max(values, key=lambda one: values[one].count(b"lora_A"))
        values[name] = values[name][:1000] + bytes([values[name][1000] ^ 1]) + values[name][1001:]
        assert taker.order("sql", "good", digest=digest).endswith("what the KV store has of it is corrupt")
        assert giver.order("", "", digest=digest, offers=True) == "", "what was corrupt is deleted, and stored again"
        assert taker.order("sql", "sql", digest=digest) == ""
        assert taker.announced == giver.announced[:1]
        assert taker.transfers == {"load/missing": 3, "load/corrupt": 1, "load/ok": 1}
        assert giver.transfers == {"store/ok": 2}

        assert taker.order("base", "good", digest=digest) == "'base' is the name of the model", "though it is here"
        assert taker.order("other", "nowhere", digest=digest) == "" and taker.transfers["load/ok"] == 1, "it is here"
        for name in [*values]:
            del values[name]
        third = Loader(base, tmp_path / "none", url)
        with closing(third.instance):
            assert third.order("sql", "good", digest=digest).endswith("the KV store does not have it")
            assert taker.order("", "", digest=digest, offers=True) == "", "whoever took it can give it, too"
            assert third.order("sql", "good", digest=digest) == ""
        shutil.rmtree(folder / "good")
        assert "cannot be read" in giver.order("", "", digest=digest, offers=True)
        shutil.copytree(folder / "alpha", folder / "good")
        assert "has other weights now" in giver.order("", "", digest=digest, offers=True)


def test_sound_chunks_of_other_weights(checkpoint: Callable[..., Path], folder: Path, tmp_path: Path) -> None:
    """Whoever writes to the store can give them any checksum; their digest they cannot."""
    base, url = checkpoint("llama", dtype="float32"), f"memory://{uuid.uuid4().hex}?timeout=600"
    taker = Loader(base, tmp_path / "empty", url)
    with closing(taker.instance):
        adapters: Any = taker.instance.engine.adapters
        for digest, files in (
            (b"1" * 16, read_files(folder / "alpha")),
            (b"2" * 16, Files(folder, b"{", b"")),
            (b"3" * 16, Files(folder, b"[" * 100_000, b"")),
        ):
            adapters._store.put(digest, files)
            error = taker.order("sql", "good", digest=digest)
            assert "cannot be read" in error and "\n" not in error
        assert taker.transfers == {"load/refused": 3} and not taker.announced
