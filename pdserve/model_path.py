"""Locates a model's files: the bundled demo, a local directory, or the model hub."""

from pathlib import Path

from pdserve.errors import SetupError

DEMO = Path(__file__).parent / "demo_model"


def resolve_model(name: str) -> Path | str:
    """Return the directory of `demo` or of a local path. Any other name is a hub id and is returned unchanged.

    Raises:
        SetupError: the name looks like a path, and the directory does not exist.
    """
    if name == "demo":
        if not DEMO.is_dir():
            raise SetupError(f"the bundled demo model is missing: {DEMO}")
        return DEMO
    path = Path(name).expanduser()
    if name and path.is_dir():
        return path
    if not name or name[0] in "./~" or name.count("/") > 1:
        raise SetupError(f"no such model directory: {name or '(empty name)'}")
    return name
