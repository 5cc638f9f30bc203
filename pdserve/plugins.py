"""Parts of pdserve that are found by entry point: extensions of our own, and parts of other packages.

Each group says with its contract what an entry is. `pdserve.extensions` has what the core runs only if a setting asks for it.

[project.entry-points."pdserve.kernels"]
mine = "my_package.kernel:load"
"""

import sys
from functools import cache
from importlib.metadata import EntryPoints, entry_points
from typing import Any

from pdserve.errors import SetupError, not_imported


@cache
def all_installed(path: tuple[str, ...]) -> Any:
    """Return the entry points of all packages on a path: reading them takes 6 ms."""
    return entry_points()


def installed(group: str) -> EntryPoints:
    """Return what installed packages have added to a group. What is installed later is not there."""
    found: EntryPoints = all_installed(tuple(sys.path)).select(group=group)
    return found


@cache
def names(group: str) -> tuple[str, ...]:
    """Return the names that installed packages have added to a group, sorted."""
    return tuple(sorted({entry.name for entry in installed(group)}))


def extension(name: str) -> Any:
    """Return an extension of our own, which is imported only now. Raises SetupError as `load`."""
    return load("pdserve.extensions", name)


@cache
def load(group: str, name: str, base: type | None = None) -> Any:
    """Return what a package has added to a group under a name: a subclass of `base`, if that is given.

    Raises:
        SetupError: it is not installed, several packages have it, it cannot be imported, or it is no such class.
    """
    entries = {entry.value: entry for entry in installed(group).select(name=name)}  # an editable one is listed twice
    if not entries:
        raise SetupError(f"{group} has no {name!r}; installed are {', '.join(names(group)) or 'none'}")
    if len(entries) > 1:
        raise SetupError(
            f"{group}: several packages have {name!r}; uninstall all but one: {', '.join(sorted(entries))}"
        )
    [entry] = entries.values()
    try:
        loaded = entry.load()
    except (ImportError, AttributeError, TypeError) as error:  # the last: a class that its base class refuses
        raise not_imported(f"{group}: {name} ({entry.value})", error) from error
    if base is not None and not (isinstance(loaded, type) and issubclass(loaded, base)):
        raise SetupError(f"{group}: {name} ({entry.value}) is not a subclass of {base.__name__}")
    return loaded
