"""Adapters that an instance loads and unloads while it runs: what it announces, and what it refuses, in a sentence."""

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pdserve.adapters.checkpoint import CONFIG, WEIGHTS
from pdserve.config import InstanceConfig
from pdserve.instance.hello import make_hello
from pdserve.instance.instance import Instance
from pdserve.proto import pdserve_pb2 as pb
from tests.low_rank import make_adapter, with_settings

PATIENCE_S = 600


class Loader:
    """An instance whose orders a test gives.

    Attributes:
        announced: names and digests that it has announced.
    """

    def __init__(self, base: Path, folder: Path) -> None:
        self.answers: list[str] = []
        self.announced: list[dict[str, bytes]] = []
        self.config = InstanceConfig(
            model=str(base), served_model_name="base", connector="memory://", num_blocks=64, lora_folder=str(folder)
        )
        self.instance = Instance(self.config, self._send)
        self.instance.on_adapters_changed = lambda found: self.announced.append({one.name: one.digest for one in found})

    def _send(self, link: str, frame: pb.InstanceFrame) -> None:
        assert frame.WhichOneof("frame") == "adapter_changed" and frame.adapter_changed.number == 7
        self.answers.append(frame.adapter_changed.error)

    def order(self, name: str, path: str, replaces: bool = False) -> str:
        """Give an order, and return the error in its answer."""
        count, deadline = len(self.answers), time.monotonic() + PATIENCE_S
        self.instance.change_adapter("router", pb.ChangeAdapter(number=7, name=name, path=path, replaces=replaces))
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
        ("x", "deep", "cannot be read: RecursionError"),
        ("base", "good", "'base' is the name of the model"),
        ("taken", "good", "the name 'taken' is taken"),
    ],
)
def test_orders_that_are_refused(loader: Loader, name: str, path: str, message: str) -> None:
    assert loader.order("taken", "alpha") == ""
    error = loader.order(name, path)
    assert message in error and "\n" not in error
    assert len(loader.announced) == 1


def test_earlier_weights_that_come_back_are_the_latest_of_their_name(loader: Loader) -> None:
    """Routers serve the latest of a name: an instance that was away must not bring the others back."""
    times = []
    for path in ("good", "alpha", "good"):
        assert loader.order("sql", path, replaces=True) == ""
        listed = make_hello("both", loader.config, loader.instance).adapters
        times += [one.loaded_at for one in listed if one.name == "sql"]
    assert times == sorted(set(times)) and len(times) == 3
