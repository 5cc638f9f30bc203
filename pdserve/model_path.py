"""Where a model's files are: the bundled demo, a directory, or the model hub."""

from pathlib import Path

from pdserve.errors import SetupError

DEMO = Path(__file__).parent / "demo_model"


def resolve_model(name: str) -> Path | str:
    """The directory of `demo` or of a local path; any other name is a hub id and comes back unchanged.

    Raises:
        SetupError: it looks like a path, and there is no such directory.
    """
    if name == "demo":
        if not DEMO.is_dir():
            raise SetupError(f"the bundled demo model is not there: {DEMO}")
        return DEMO
    path = Path(name).expanduser()
    if name and path.is_dir():
        return path
    if not name or name[0] in "./~" or name.count("/") > 1:
        raise SetupError(f"no such model directory: {name or '(empty name)'}")
    return name
