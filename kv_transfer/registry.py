"""Creates connectors by URL. Packages register theirs in the entry-point group `pdserve.connectors`.

    [project.entry-points."pdserve.connectors"]
    mystore = "my_package.connector:MyConnector"

The name is the URL scheme. The class is imported only when its scheme is used, and constructed with the URL.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from pdserve.errors import SetupError
from pdserve.kv_transfer.connector import API_VERSION, Connector
from pdserve.kv_transfer.url import without_password

ENTRY_POINT_GROUP = "pdserve.connectors"


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
    return _load(_find(scheme.lower()))(url)


def _find(scheme: str) -> EntryPoint:
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


def _load(entry: EntryPoint) -> Callable[[str], Connector]:
    try:
        connector_class = entry.load()
    except (ImportError, AttributeError) as error:
        raise SetupError(f"The connector for {entry.name}:// ({entry.value}) cannot be imported: {error}.") from error
    if not isinstance(connector_class, type) or not issubclass(connector_class, Connector):
        raise SetupError(f"The connector for {entry.name}:// ({entry.value}) is not a subclass of Connector.")
    if connector_class.API_VERSION != API_VERSION:
        raise SetupError(
            f"The connector for {entry.name}:// ({entry.value}) was written for version {connector_class.API_VERSION} "
            f"of the connector contract; this pdserve supports version {API_VERSION}."
        )
    return connector_class


def _describe(entry: EntryPoint) -> InstalledConnector:
    package = entry.dist.name if entry.dist else ""
    version = entry.dist.version if entry.dist else ""
    return InstalledConnector(entry.name, entry.value, package, version)
