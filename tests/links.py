"""The links in pdserve/, without which nothing can be imported: `python tests/links.py` says if the checkout has none."""

import sys
from pathlib import Path


def complaint(root: Path) -> str:
    """A sentence on links that are plain files, as git writes them where it makes no links; empty if there are none."""
    flat = [path.name for path in (root / "pdserve").iterdir() if path.is_file() and (root / path.name).is_dir()]
    if not flat:
        return ""
    names = ", ".join(f"pdserve/{name}" for name in sorted(flat))
    return (
        f"{names}: in this checkout these are plain files and not symbolic links, so pdserve cannot be imported; "
        "clone it again with `git clone -c core.symlinks=true` onto a file system that has links."
    )


if __name__ == "__main__":
    sys.exit(complaint(Path(__file__).parent.parent) or None)
