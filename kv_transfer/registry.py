"""Creates connectors by URL. Packages register theirs in the entry-point group `pdserve.connectors`.

    [project.entry-points."pdserve.connectors"]
    mystore = "my_package.connector:MyConnector"

The name is the URL scheme. The class is imported only when its scheme is used, and constructed with the URL.
"""

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from inspect import getattr_static
from typing import cast

from pdserve.errors import SetupError, not_imported
from pdserve.kv_transfer.connector import API_VERSION, Capabilities, Connector
from pdserve.kv_transfer.url import without_password

log = logging.getLogger(__name__)

SCHEME = re.compile("[a-z][a-z0-9+.-]*")
ENTRY_POINT_GROUP = "pdserve.connectors"
# The attributes by which connectors for version 1 of the contract declare their capabilities.
_VERSION_1 = {
    "timeout": "timeout_s",
    "in_place": "in_place",
    "follows": "follows",
    "keeps_leases": "keeps_leases",
    "skips_hanging": "skips_hanging",
    "relayed": "relayable",
    "codec_name": "codec",
}


@dataclass(frozen=True)
class InstalledConnector:
    """An installed connector, by its URL scheme."""

    scheme: str
    target: str  # module:class
    package: str
    version: str


def installed() -> list[InstalledConnector]:
    """List the connectors installed in this environment, sorted by scheme."""
    connectors = {_describe(entry) for entry in entry_points(group=ENTRY_POINT_GROUP)}
    return sorted(connectors, key=lambda connector: (connector.scheme, connector.package))


def connect(url: str) -> Connector:
    """Create the connector for this URL. It is not attached yet.

    Raises:
        SetupError: unknown scheme, unusable connector class, or invalid parameters.
    """
    scheme, separator, _ = url.partition("://")
    if not separator:
        names = ", ".join(f"{one.scheme}://" for one in installed())
        raise SetupError(f"{without_password(url)!r} is not a connector URL; it must begin with one of: {names}.")
    create = cast("Callable[[str], Connector]", connector_class(scheme.lower()))
    return create(url)


def connector_class(scheme: str) -> type[Connector]:
    """Return the class for this URL scheme, adapted if it is for version 1 of the contract. Raises `SetupError` as above."""
    entry = _find(scheme)
    loaded = _load(entry)
    if loaded.API_VERSION == 1:
        return _adapt_version_1(loaded)
    if loaded.API_VERSION != API_VERSION:
        raise SetupError(
            f"The connector for {entry.name}:// ({entry.value}) was written for version {loaded.API_VERSION} "
            f"of the connector contract; this pdserve supports version {API_VERSION}."
        )
    return loaded


def _find(scheme: str) -> EntryPoint:
    if not SCHEME.fullmatch(scheme):  # urllib.parse would take all of the URL for a path
        raise SetupError(f"{scheme!r} is no URL scheme: it has lower-case letters, digits, + - and . only.")
    # A dict, because an editable install can list the same entry point twice.
    entries = {entry.value: entry for entry in entry_points(group=ENTRY_POINT_GROUP, name=scheme)}
    if not entries:
        names = ", ".join(one.scheme for one in installed())
        raise SetupError(f"There is no connector for {scheme}://; installed schemes: {names}.")
    if len(entries) > 1:
        raise SetupError(
            f"Several installed packages register {scheme}://; uninstall all but one: {', '.join(sorted(entries))}."
        )
    return next(iter(entries.values()))


def _load(entry: EntryPoint) -> type[Connector]:
    try:
        loaded = entry.load()
    except (ImportError, AttributeError, TypeError) as error:  # the last: a class that the base class refuses
        raise not_imported(f"The connector for {entry.name}:// ({entry.value})", error) from error
    if not isinstance(loaded, type) or not issubclass(loaded, Connector):
        raise SetupError(f"The connector for {entry.name}:// ({entry.value}) is not a subclass of Connector.")
    return loaded


@cache  # one class, and one line in the log
def _adapt_version_1(old: type[Connector]) -> type[Connector]:
    """Return a subclass that translates what version 1 of the contract expected as attributes."""
    log.warning(
        "%s.%s was written for version 1 of the connector contract and is adapted to version %d",
        old.__module__,
        old.__qualname__,
        API_VERSION,
    )

    def capabilities(self: Connector) -> Capabilities:
        inherited: Capabilities = super(adapted, self).capabilities  # type: ignore[misc]  # of `old`
        declared = {
            new: getattr(self, name)
            for name, new in _VERSION_1.items()
            if getattr_static(self, name, None) is not getattr_static(Connector, name, None)
        }
        return replace(inherited, **declared)

    def parts(self: Connector) -> Sequence[Connector]:
        getattr(self, "settle", lambda: None)()
        return getattr(self, "connectors", None) or [self]

    members = {"__module__": old.__module__, "capabilities": property(capabilities), "parts": parts}
    adapted = cast("type[Connector]", type(old.__name__, (old,), members))
    return adapted


def _describe(entry: EntryPoint) -> InstalledConnector:
    package = entry.dist.name if entry.dist else ""
    version = entry.dist.version if entry.dist else ""
    return InstalledConnector(entry.name, entry.value, package, version)
