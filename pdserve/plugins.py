"""Parts of pdserve from other packages, found by entry point. Each group says with its contract what an entry is.

[project.entry-points."pdserve.kernels"]
mine = "my_package.kernel:load"
"""

from functools import cache
from importlib.metadata import entry_points
from typing import Any

from pdserve.errors import SetupError


@cache
def names(group: str) -> tuple[str, ...]:
    """Return the names that installed packages have added to a group, sorted."""
    return tuple(sorted({entry.name for entry in entry_points(group=group)}))


@cache
def load(group: str, name: str) -> Any:
    """Return what a package has added to a group under a name.

    Raises:
        SetupError: it is not installed, or cannot be imported.
    """
    entry = next(iter(entry_points(group=group, name=name)), None)
    if entry is None:
        raise SetupError(f"{group} has no {name!r}; installed are {', '.join(names(group)) or 'none'}")
    try:
        return entry.load()
    except (ImportError, AttributeError) as error:
        raise SetupError(f"{group}: {name} ({entry.value}) cannot be imported: {error}") from error
