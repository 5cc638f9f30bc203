"""Parts that are found by entry point: which is loaded, and what is wrong with those that are not."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pdserve import plugins
from pdserve.errors import SetupError
from pdserve.router.web.dialect import ENTRY_POINT_GROUP, Dialect, OpenAI, load_dialects

GROUP = "pdserve.of_tests"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    plugins.names.cache_clear()
    plugins.all_installed.cache_clear()
    yield tmp_path
    plugins.names.cache_clear()
    plugins.load.cache_clear()


def test_what_is_installed_and_what_is_wrong_with_it(folder: Path, install_connectors: Callable[..., None]) -> None:
    (folder / "source.py").write_text("class Part(dict): pass\nother = 1\n")
    names = {"part": "Part", "other": "other", "lost": "lost"}
    install_connectors(folder, "some_parts", folder / "source.py", names, group=GROUP)
    assert plugins.names(GROUP) == ("lost", "other", "part")
    assert issubclass(plugins.load(GROUP, "part", dict), dict) and plugins.load(GROUP, "other") == 1
    for name, wrong in {
        "none": "has no 'none'; installed are lost, other, part",
        "lost": r"lost \(some_parts:lost\) cannot be imported: .*has no attribute 'lost'",
        "other": r"other \(some_parts:other\) is not a subclass of dict",
    }.items():
        with pytest.raises(SetupError, match=wrong):
            plugins.load(GROUP, name, dict)
    install_connectors(folder, "more_parts", folder / "source.py", {"part": "Part"}, group=GROUP)
    plugins.load.cache_clear()
    plugins.all_installed.cache_clear()
    with pytest.raises(SetupError, match="'part'; uninstall all but one: more_parts:Part, some_parts:Part"):
        plugins.load(GROUP, "part")


def test_every_installed_dialect_is_served_or_refused(folder: Path, install_connectors: Callable[..., None]) -> None:
    assert [dialect.__name__ for dialect in load_dialects()] == [
        *("OpenAI", "AdapterEndpoints", "Batches", "EmbeddingEndpoints", "Messages", "Responses"),
    ]
    assert all(issubclass(dialect, Dialect) for dialect in load_dialects()) and load_dialects()[0] is OpenAI
    (folder / "source.py").write_text("class NoDialect: pass\n")
    install_connectors(folder, "no_dialects", folder / "source.py", {"no": "NoDialect"}, group=ENTRY_POINT_GROUP)
    plugins.names.cache_clear()
    plugins.all_installed.cache_clear()
    with pytest.raises(SetupError, match=r"no \(no_dialects:NoDialect\) is not a subclass of Dialect"):
        load_dialects()
