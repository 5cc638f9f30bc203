"""Builds the site of the documents: every committed Markdown file, what these link to, and the reference pages."""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import reference
import typer

ROOT = Path(__file__).parent.parent


def linked_files(document: Path) -> set[Path]:
    """Return the files of the tree that a document links to."""
    links = re.findall(r"\]\(([^)#\s]+)", document.read_text())
    targets = {(document.parent / link).resolve() for link in links if "://" not in link}
    return {target for target in targets if target.is_file() and target.is_relative_to(ROOT)}


def stage(folder: Path) -> None:
    """Copy the documents into a folder, where their links hold as they do in the tree, and write the reference pages."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "*.md"], cwd=ROOT, capture_output=True, check=True
    ).stdout.decode()
    documents = {ROOT / name for name in listed.split("\0") if name}
    for file in documents.union(*map(linked_files, documents)):
        copy = folder / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
    reference.main(folder / "docs" / "reference")


def main(folder: Annotated[Path, typer.Argument()] = ROOT / ".cache" / "site") -> None:
    """Build the site into a folder. A warning, such as of a link that leads nowhere, is an error."""
    with tempfile.TemporaryDirectory() as staged:
        settings = Path(staged) / "mkdocs.yml"
        settings.write_text((ROOT / "mkdocs.yml").read_text())
        stage(Path(staged) / "docs")
        command = [
            sys.executable,
            "-m",
            "mkdocs",
            "build",
            "--strict",
            "-q",
            "-f",
            str(settings),
            "-d",
            str(folder.resolve()),
        ]
        raise SystemExit(subprocess.run(command, check=False).returncode)


if __name__ == "__main__":
    typer.run(main)
