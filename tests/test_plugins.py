"""Parts that are found by entry point: which is loaded, and what is wrong with those that are not."""

from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve import plugins
from pdserve.errors import SetupError
from pdserve.router.web.dialect import ENTRY_POINT_GROUP, Dialect, OpenAI, load_dialects

GROUP = "pdserve.of_tests"


def test_what_is_installed_and_what_is_wrong_with_it(
    package_folder: Path, install_connectors: Callable[..., None]
) -> None:
    (package_folder / "source.py").write_text("class Part(dict): pass\nother = 1\n")
    names = {"part": "Part", "other": "other", "lost": "lost"}
    install_connectors(package_folder, "some_parts", package_folder / "source.py", names, group=GROUP)
    assert plugins.names(GROUP) == ("lost", "other", "part")
    assert issubclass(plugins.load(GROUP, "part", dict), dict) and plugins.load(GROUP, "other") == 1
    for name, wrong in {
        "none": "has no 'none'; installed are lost, other, part",
        "lost": r"lost \(some_parts:lost\) cannot be imported: .*has no attribute 'lost'",
        "other": r"other \(some_parts:other\) is not a subclass of dict",
    }.items():
        with pytest.raises(SetupError, match=wrong):
            plugins.load(GROUP, name, dict)
    install_connectors(package_folder, "more_parts", package_folder / "source.py", {"part": "Part"}, group=GROUP)
    plugins.load.cache_clear()
    plugins.all_installed.cache_clear()
    with pytest.raises(SetupError, match="'part'; uninstall all but one: more_parts:Part, some_parts:Part"):
        plugins.load(GROUP, "part")


def test_every_installed_dialect_is_served_or_refused(
    package_folder: Path, install_connectors: Callable[..., None]
) -> None:
    assert [dialect.__name__ for dialect in load_dialects()] == [
        *("OpenAI", "AdapterEndpoints", "Batches", "EmbeddingEndpoints", "Messages", "Responses"),
    ]
    assert all(issubclass(dialect, Dialect) for dialect in load_dialects()) and load_dialects()[0] is OpenAI
    (package_folder / "source.py").write_text("class NoDialect: pass\n")
    install_connectors(
        package_folder, "no_dialects", package_folder / "source.py", {"no": "NoDialect"}, group=ENTRY_POINT_GROUP
    )
    plugins.names.cache_clear()
    plugins.all_installed.cache_clear()
    with pytest.raises(SetupError, match=r"no \(no_dialects:NoDialect\) is not a subclass of Dialect"):
        load_dialects()
