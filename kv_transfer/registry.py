"""From a URL to a connector: packages announce theirs in the entry-point group `pdserve.connectors`.

    [project.entry-points."pdserve.connectors"]
    mystore = "my_package.connector:MyConnector"

The name is the URL's scheme; the class is constructed with the URL and imported only when its scheme is asked for.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from pdserve.errors import SetupError
from pdserve.kv_transfer.connector import API_VERSION, Connector
from pdserve.kv_transfer.url import without_password

GROUP = "pdserve.connectors"


@dataclass(frozen=True)
class Installed:
    """One scheme that `connect` understands."""

    scheme: str
    target: str  # module:class
    package: str
    version: str


def installed() -> list[Installed]:
    """Every connector of this environment, by scheme."""
    found = {_describe(entry) for entry in entry_points(group=GROUP)}
    return sorted(found, key=lambda one: (one.scheme, one.package))


def connect(url: str) -> Connector:
    """The connector for this URL, not attached yet.

    Raises:
        SetupError: no such scheme, a plug-in that cannot be used, or parameters that it does not know.
    """
    scheme, mark, _ = url.partition("://")
    if not mark:
        names = ", ".join(f"{one.scheme}://" for one in installed())
        raise SetupError(f"{without_password(url)!r} is no connector URL; write one that begins with one of: {names}.")
    return _load(_find(scheme.lower()))(url)


def _find(scheme: str) -> EntryPoint:
    # An editable install can list the same entry point twice, hence the dict.
    entries = {entry.value: entry for entry in entry_points(group=GROUP, name=scheme)}
    if not entries:
        names = ", ".join(one.scheme for one in installed())
        raise SetupError(f"There is no connector for {scheme}://; installed are: {names}.")
    if len(entries) > 1:
        raise SetupError(
            f"Several installed packages claim {scheme}://, keep one of them: {', '.join(sorted(entries))}."
        )
    return next(iter(entries.values()))


def _load(entry: EntryPoint) -> Callable[[str], Connector]:
    try:
        found = entry.load()
    except (ImportError, AttributeError) as error:
        raise SetupError(f"The connector for {entry.name}:// ({entry.value}) cannot be imported: {error}.") from error
    if not isinstance(found, type) or not issubclass(found, Connector):
        raise SetupError(f"The connector for {entry.name}:// ({entry.value}) is not a subclass of Connector.")
    if found.API_VERSION != API_VERSION:
        raise SetupError(
            f"The connector for {entry.name}:// ({entry.value}) was written for version {found.API_VERSION} "
            f"of the connector contract; this pdserve speaks version {API_VERSION}."
        )
    return found


def _describe(entry: EntryPoint) -> Installed:
    package = entry.dist.name if entry.dist else ""
    version = entry.dist.version if entry.dist else ""
    return Installed(entry.name, entry.value, package, version)
