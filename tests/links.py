"""Check of the symbolic links in pdserve/, without which nothing can be imported: `python tests/links.py`."""

import sys
from pathlib import Path


def link_error(root: Path) -> str:
    """Return an error message if git has checked out the links as plain files, or ""."""
    flat = [path.name for path in (root / "pdserve").iterdir() if path.is_file() and (root / path.name).is_dir()]
    if not flat:
        return ""
    names = ", ".join(f"pdserve/{name}" for name in sorted(flat))
    return (
        f"{names}: in this checkout these are plain files and not symbolic links, so pdserve cannot be imported; "
        "clone it again with `git clone -c core.symlinks=true` onto a file system that has links."
    )


if __name__ == "__main__":
    sys.exit(link_error(Path(__file__).parent.parent) or None)
