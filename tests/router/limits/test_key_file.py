"""API keys declared in a setting and in a TOML file."""

from pathlib import Path

import pytest

from pdserve.config import RouterConfig
from pdserve.errors import SetupError
from pdserve.router.limits.key_file import load_api_keys
from pdserve.router.limits.quota import Limits, Rate


def test_keys_from_a_setting_and_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(
        f'[alice]\nkey = "one"\nweight = 2\nrequests = "10/s"\ntokens = "6000 / min"\nconcurrency = 8\n'
        f'[bob]\nkey = "sha256:{"ab" * 32}"\nadapters = ["sql"]\n'
    )
    first, second, alice, bob = load_api_keys("two,three", str(file))
    assert (first.name, second.name, first.weight, first.limits) == ("key-1", "key-2", 1.0, Limits())
    assert (alice.name, alice.weight) == ("alice", 2.0) and "digest" not in repr(alice)
    assert alice.limits == Limits(requests=Rate(10, 1.0), tokens=Rate(6000, 60.0), concurrency=8)
    assert bob.digest == b"\xab" * 32 and bob.limits == Limits()
    assert bob.adapters == frozenset({"sql"}) and alice.adapters is None


def test_each_key_or_group_has_kv_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text("".join(f'[{name}]\nkey = "of {name}"\ngroup = "{name[0]}"\n' for name in ("a1", "a2", "b")))
    alone, first, second, other = (key.kv_salt for key in load_api_keys("setting", str(file)))
    assert first == second and len({alone, first, other}) == 3 and all(len(one) == 32 for one in (alone, first, other))
    file.write_text('[a]\nkey = "of a"')
    assert load_api_keys("setting", str(file))[1].kv_salt not in (first, ""), "a key is not the group of its name"
    for keys in (load_api_keys("", str(file)), load_api_keys("two,keys"), load_api_keys("b", str(file), share_kv=True)):
        assert not any(key.kv_salt for key in keys)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[".."]\nkey = "one"', "and not be . or .."),
        ('["."]\nkey = "one"', "and not be . or .."),
        ('[alice]\nkey = "one"\ngroup = 3', "group must be a name"),
        ("", "declares no key"),
        ("[alice\n", "cannot be read"),
        ("a = " + "[" * 100_000, "cannot be read"),
        ('[alice]\nkey = "a\\nb"', "printable characters only"),
        ("\xff", "cannot be read"),
        ('alice = "one"', r"\[alice\]: this must be a table"),
        ("[alice]", 'key = "…" is missing'),
        ('["a b"]\nkey = "one"', "a name must have 1 to 64"),
        ('[alice]\nkey = "one"\nlimit = 3', "unknown field limit; the fields are key, weight"),
        ('[alice]\nkey = "sha256:12"', "64 hexadecimal digits"),
        ('[alice]\nkey = "one"\nrequests = 10', "'10' is not a rate; write for example 10/s"),
        ('[alice]\nkey = "one"\ntokens = "0/min"', "is not a rate"),
        ('[alice]\nkey = "one"\nweight = 0', "weight must be"),
        ('[alice]\nkey = "one"\nweight = nan', "weight must be"),
        ('[alice]\nkey = "one"\nconcurrency = true', "concurrency must be"),
        ('[alice]\nkey = "one"\nadapters = "sql"', r'adapters must be a list of names, such as \["sql"\], not \'sql\''),
        ('[alice]\nkey = "one"\n[bob]\nkey = "one"', "two API keys have the same digest"),
        ('[key-1]\nkey = "one"', "two API keys have the same name"),
        ('[anonymous]\nkey = "one"', "this name is reserved for requests without a key"),
    ],
)
def test_an_invalid_file_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "keys.toml"
    file.write_bytes(text.encode("latin-1") if text == "\xff" else text.encode())
    with pytest.raises(SetupError, match=message) as raised:
        load_api_keys("another", str(file))
    assert "\n" not in str(raised.value)


def test_a_missing_file() -> None:
    with pytest.raises(SetupError, match=r"--keys-file nowhere cannot be read: No such file or directory$"):
        load_api_keys("", "nowhere")


@pytest.mark.parametrize("setting", ["a,,b", ",", " ", "sha256:12", "a,", "a\nb"])
def test_an_invalid_setting_is_rejected(setting: str) -> None:
    with pytest.raises(SetupError):
        load_api_keys(setting)


def test_keys_are_not_in_the_repr_of_the_config() -> None:
    assert "secret" not in repr(RouterConfig(api_key="secret", admin_key="secret"))
