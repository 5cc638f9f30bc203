"""Files of warm prompts that cannot be used are errors at the start, which say why."""

from pathlib import Path

import pytest

from pdserve.errors import SetupError
from pdserve.router.limits.key_file import load_api_keys
from pdserve.router.web.warm_prompts import read_warm_prompts


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
