"""API keys and their limits, read from a comma-separated setting and from a TOML file.

    [alice]
    key = "sha256:2bd806c97f0e00af1a1fc3328fa763a9269723c8db8fac4f93af71db186d6e90"
    weight = 2               # its share when requests queue; default 1
    requests = "10/s"        # or "600/min", "1000000/h"; default: unlimited
    tokens = "100000/min"    # of prompts and outputs together
    concurrency = 8          # choices running or queued at once
    group = "research"       # keys of a group reuse each other's KV; default: a key reuses only its own
    adapters = ["sql"]       # those that it may name as a model, besides the base; default: all

A key is given in plain text or as `sha256:` and its hexadecimal digest; the router keeps digests only.
"""

import hashlib
import re
from dataclasses import dataclass, field, replace

from pdserve.errors import SetupError, reason
from pdserve.lines.untrusted import read_toml
from pdserve.request import Tenant
from pdserve.router.limits.quota import Limits, Rate

DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})")
NAME = re.compile(r"(?!\.\.?$)[A-Za-z0-9._-]{1,64}")  # also a folder's name, and `.` and `..` are others
ANONYMOUS = "anonymous"  # the key name of requests to paths that need no key
FIELDS = ("key", "weight", "requests", "tokens", "concurrency", "group", "adapters")
KV_SALT_BYTES = 16  # of a digest


@dataclass(frozen=True)
class ApiKey:
    """A declared API key: the name used in metrics, its SHA-256 digest (32 bytes), its weight and its limits.

    Attributes:
        group: of keys that reuse each other's KV; empty: it is alone.
        adapters: names of those that its requests may have; None: all.
        kv_salt: hexadecimal digest that separates the KV of its requests from that of other keys; empty: none does.
    """

    name: str
    digest: bytes = field(repr=False)
    weight: float = 1.0
    limits: Limits = field(default_factory=Limits)
    group: str = ""
    adapters: frozenset[str] | None = None
    kv_salt: str = ""

    @property
    def tenant(self) -> Tenant:
        """The key as instances know it: its weight, and a number that is the same on all routers."""
        digest = hashlib.blake2b(self.name.encode(), digest_size=8).digest()
        return Tenant(int.from_bytes(digest, "little"), self.weight)


def load_api_keys(setting: str, path: str = "", *, share_kv: bool = False) -> list[ApiKey]:
    """Return the keys of the setting, named key-1, key-2, …, followed by those of the file. Either may be empty.

    With a file and more than one key, each key or group has KV of its own, unless they are to share their KV.

    Raises:
        SetupError: the file cannot be read, or a declaration is invalid or duplicated; one sentence says which.
    """
    keys: list[ApiKey] = []
    if setting:
        keys += [ApiKey(f"key-{i}", _digest_of(value.strip())) for i, value in enumerate(setting.split(","), 1)]
    if path:
        keys += _read(path)
    for attribute in ("name", "digest"):
        if len({getattr(key, attribute) for key in keys}) < len(keys):
            raise SetupError(f"two API keys have the same {attribute}; declare each key once")
    if path and len(keys) > 1 and not share_kv:
        keys = [replace(key, kv_salt=_kv_salt(key)) for key in keys]
    return keys


def _kv_salt(key: ApiKey) -> str:
    kind, name = ("group", key.group) if key.group else ("key", key.name)
    return hashlib.blake2b(f"pdserve {kind} {name}".encode(), digest_size=KV_SALT_BYTES).hexdigest()


def _read(path: str) -> list[ApiKey]:
    try:
        with open(path, "rb") as file:
            tables = read_toml(file.read())
    except (OSError, ValueError) as error:
        raise SetupError(f"--keys-file {path} cannot be read: {reason(error)}") from error
    if not tables:
        raise SetupError(f"--keys-file {path} declares no key; add a table for each key, such as [alice]")
    keys = []
    for name, table in tables.items():
        try:
            keys.append(_parse_key(name, table))
        except (ValueError, SetupError) as error:
            raise SetupError(f"--keys-file {path}, [{name}]: {error}") from error
    return keys


def _parse_key(name: str, table: object) -> ApiKey:
    """Return the key that one table declares. Raises ValueError or SetupError if it is invalid."""
    if not NAME.fullmatch(name):
        raise ValueError(
            "a name must have 1 to 64 of the characters A-Z, a-z, 0-9, '.', '_' and '-', and not be . or .."
        )
    if name == ANONYMOUS:
        raise ValueError("this name is reserved for requests without a key; choose another")
    if not isinstance(table, dict):
        raise ValueError("this must be a table that contains a key")
    if unknown := set(table) - set(FIELDS):
        raise ValueError(f"unknown field {min(unknown)}; the fields are {', '.join(FIELDS)}")
    key, weight, concurrency = table.get("key"), table.get("weight", 1), table.get("concurrency")
    if not isinstance(key, str):
        raise ValueError('key = "…" is missing; give the key itself, or sha256: and its digest')
    if not isinstance(weight, int | float) or not 1e-3 <= weight <= 1e6 or isinstance(weight, bool):
        raise ValueError(f"weight must be a number from 0.001 to 1000000, not {weight!r}")
    if concurrency is not None and (type(concurrency) is not int or concurrency < 1):
        raise ValueError(f"concurrency must be an integer, 1 or more, not {concurrency!r}")
    group = table.get("group", "")
    if not isinstance(group, str) or (group and not NAME.fullmatch(group)):
        raise ValueError(
            f"group must be a name of 1 to 64 of the characters A-Z, a-z, 0-9, '.', '_' and '-', not {group!r}"
        )
    adapters = table.get("adapters")
    if adapters is not None and not (isinstance(adapters, list) and all(isinstance(name, str) for name in adapters)):
        raise ValueError(f'adapters must be a list of names, such as ["sql"], not {adapters!r}')
    allowed = None if adapters is None else frozenset(adapters)
    rates = {unit: Rate.parse(str(table[unit])) for unit in ("requests", "tokens") if unit in table}
    return ApiKey(name, _digest_of(key), float(weight), Limits(**rates, concurrency=concurrency), group, allowed)


def _digest_of(value: str) -> bytes:
    if not value:
        raise SetupError("a key is empty; separate keys by single commas, with none at either end")
    if not value.isprintable():
        raise SetupError("a key must have printable characters only, since clients send it in a header")
    if not value.startswith("sha256:"):
        return hashlib.sha256(value.encode()).digest()
    digest = DIGEST.fullmatch(value)
    if digest is None:
        raise SetupError("a key that begins with sha256: must continue with the 64 hexadecimal digits of its digest")
    return bytes.fromhex(digest[1])
