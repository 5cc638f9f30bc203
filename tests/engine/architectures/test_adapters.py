"""An architecture adapter from another package: found by its entry point, and asked what the KV of a model is."""

import importlib
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoints
from pathlib import Path
from typing import Any

import pytest

from pdserve import plugins
from pdserve.config import EngineConfig
from pdserve.engine.architectures import adapters
from pdserve.engine.engine import Engine
from pdserve.errors import SetupError
from pdserve.request import Request, SamplingParams

Install = Callable[[dict[str, str]], list[str]]


@pytest.fixture
def install(
    tmp_path: Path, install_connectors: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Install]:
    """install({"loud": "adapt"}) installs the package, and returns the models that its adapter sees."""

    def run(names: dict[str, str]) -> list[str]:
        module = Path(__file__).parent / "loud_adapter.py"
        install_connectors(tmp_path, "loud_adapter", module, names, group=adapters.GROUP)
        monkeypatch.syspath_prepend(str(tmp_path))
        plugins.names.cache_clear()
        seen: list[str] = importlib.import_module("loud_adapter").seen
        return seen

    yield run
    del sys.modules["loud_adapter"]
    plugins.names.cache_clear()
    plugins.load.cache_clear()


def engine_of(path: Path) -> Engine:
    return Engine(EngineConfig(model=str(path), num_blocks=64))


def test_an_adapter_of_another_package_states_the_kv(
    checkpoint: Callable[..., Path], generate: Callable[..., Any], prompts: list[list[int]], install: Install
) -> None:
    seen, path = install({"loud": "adapt"}), checkpoint("opt", dtype="float32")
    engine = engine_of(path)
    assert seen == [f"OPTForCausalLM of {path.name}, pooling auto"]
    assert len(engine.checkpoint.spec.groups) == 3, "as the adapter says; without it, the layers show one"
    seq = engine.new_sequence(
        "r", Request(prompt=prompts[8], sampling=SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    )
    engine.add(seq)
    while seq.output.finish_reason() is None:
        engine.step()
    assert seq.output.tokens[seq.output.num_prompt :].tolist() == generate(path, [prompts[8]], 8)[0]
    assert len(engine_of(checkpoint("llama")).checkpoint.spec.groups) == 1, "not of this architecture"


def test_two_adapters_that_know_the_kv_are_refused(checkpoint: Callable[..., Path], install: Install) -> None:
    install({"loud": "adapt", "louder": "adapt_too"})
    with pytest.raises(SetupError, match="loud and louder both say what the KV of OPTForCausalLM is; remove one"):
        engine_of(checkpoint("opt"))


def test_a_spec_that_does_not_fit_the_model_is_refused(
    checkpoint: Callable[..., Path], install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install({"louder": "adapt_too"})
    with pytest.raises(SetupError, match="its adapter states the KV of 1 of 3 layers"):
        engine_of(checkpoint("llama"))
    monkeypatch.setattr(sys.modules["loud_adapter"], "NUM_LAYERS", 3)
    with pytest.raises(SetupError, match="the keys of layer 0 have another shape than its model's KVSpec says"):
        engine_of(checkpoint("llama"))


def test_a_package_that_was_not_installed_again_is_reported(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugins, "installed", lambda group: EntryPoints())
    plugins.load.cache_clear()
    with pytest.raises(SetupError, match=r"pdserve.architectures has no 'attention-sinks'; installed are"):
        engine_of(checkpoint("llama"))
