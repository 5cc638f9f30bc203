"""API keys as they are declared: comma separated in a setting, or in a TOML file that says what each may ask for.

    [alice]
    key = "sha256:2bd806c97f0e00af1a1fc3328fa763a9269723c8db8fac4f93af71db186d6e90"
    weight = 2               # its share when requests have to wait; default 1
    requests = "10/s"        # or "600/min", "1000000/h"; default: any number
    tokens = "100000/min"    # of prompts and answers together
    concurrency = 8          # choices under way at once

A key stands there as it is, or as `sha256:` and the hexadecimal digest of it; the router keeps digests only.
"""

import hashlib
import re
import tomllib
from dataclasses import dataclass, field

from pdserve.errors import SetupError
from pdserve.router.limits.quota import Limits, Rate

DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})")
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
FIELDS = ("key", "weight", "requests", "tokens", "concurrency")


@dataclass(frozen=True)
class Key:
    """`name` is what metrics call it; `digest` is its SHA-256, 32 bytes."""

    name: str
    digest: bytes = field(repr=False)
    weight: float = 1.0
    limits: Limits = field(default_factory=Limits)


def declared(setting: str, path: str = "") -> list[Key]:
    """The keys of a setting, named key-1, key-2, …, and those of a file. Either may be empty.

    Raises:
        SetupError: with one sentence, for whatever is wrong about them.
    """
    keys = [Key(f"key-{i}", _digest_of(one.strip())) for i, one in enumerate(setting.split(","), 1)] if setting else []
    if path:
        keys += _read(path)
    for what in ("name", "digest"):
        if len({getattr(key, what) for key in keys}) < len(keys):
            raise SetupError(f"two API keys have the same {what}; each has to be declared once")
    return keys


def _read(path: str) -> list[Key]:
    try:
        with open(path, "rb") as file:
            tables = tomllib.load(file)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SetupError(f"--keys-file {path} cannot be read: {error}") from error
    if not tables:
        raise SetupError(f"--keys-file {path} declares no key; a table for each is needed, such as [alice]")
    keys = []
    for name, table in tables.items():
        try:
            keys.append(_key(name, table))
        except (ValueError, SetupError) as error:
            raise SetupError(f"--keys-file {path}, [{name}]: {error}") from error
    return keys


def _key(name: str, table: object) -> Key:
    """Raises ValueError or SetupError."""
    if not NAME.fullmatch(name):
        raise ValueError("a name has 1 to 64 characters out of A-Z, a-z, 0-9, '.', '_' and '-'")
    if not isinstance(table, dict):
        raise ValueError("this must be a table with a key in it")
    if unknown := set(table) - set(FIELDS):
        raise ValueError(f"{min(unknown)} is unknown; there are {', '.join(FIELDS)}")
    key, weight, concurrency = table.get("key"), table.get("weight", 1), table.get("concurrency")
    if not isinstance(key, str):
        raise ValueError('key = "…" is missing, the key itself or sha256: and its digest')
    if not isinstance(weight, int | float) or not 1e-3 <= weight <= 1e6 or isinstance(weight, bool):
        raise ValueError(f"weight must be a number from 0.001 to 1000000, not {weight!r}")
    if concurrency is not None and (type(concurrency) is not int or concurrency < 1):
        raise ValueError(f"concurrency must be a whole number, 1 or more, not {concurrency!r}")
    rates = {what: Rate.parse(str(table[what])) for what in ("requests", "tokens") if what in table}
    return Key(name, _digest_of(key), float(weight), Limits(**rates, concurrency=concurrency))


def _digest_of(setting: str) -> bytes:
    if not setting:
        raise SetupError("a key is empty: keys are separated by single commas, with none at either end")
    if not setting.startswith("sha256:"):
        return hashlib.sha256(setting.encode()).digest()
    digest = DIGEST.fullmatch(setting)
    if digest is None:
        raise SetupError("a key that begins with sha256: must go on with the 64 hexadecimal digits of its digest")
    return bytes.fromhex(digest[1])
