"""The wheel, built from the sdist: it contains every file of the package, and runs in an empty environment."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BUILD = "import sys; from setuptools import build_meta; build_meta.build_{}(sys.argv[1])"


def run(*command: object, cwd: Path) -> str:
    result = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the files in git's index."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    folder = tmp_path_factory.mktemp("source")
    run("git", "checkout-index", "--all", f"--prefix={folder}/", cwd=ROOT)
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-c", BUILD.format("sdist"), folder, cwd=source)
    (sdist,) = folder.glob("*.tar.gz")
    run("tar", "-xzf", sdist.name, cwd=folder)
    run(sys.executable, "-c", BUILD.format("wheel"), folder, cwd=folder / sdist.name.removesuffix(".tar.gz"))
    (built,) = folder.glob("*.whl")
    return built


def test_every_file_of_the_package_is_in_the_wheel(source: Path, wheel: Path) -> None:
    folders = os.walk(source / "pdserve", followlinks=True)
    files = {(Path(folder) / name).relative_to(source).as_posix() for folder, _, names in folders for name in names}
    files = {name for name in files if "egg-info" not in name}
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("pdserve/")}
    assert inside == files
    assert {"pdserve/py.typed", "pdserve/router/web/page/page.js", "pdserve/demo_model/model.safetensors"} <= inside


@pytest.mark.slow  # installs the dependencies from a package index: minutes, and most of a GB
@pytest.mark.timeout(1200)
def test_demo_runs_from_the_wheel_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", tmp_path / "env", cwd=tmp_path)
    for requirement in ("torch", wheel):
        run(tmp_path / "env/bin/pip", "install", "-q", "-c", ROOT / "constraints.txt", requirement, cwd=tmp_path)
    assert "Paris" in run(tmp_path / "env/bin/pdserve", "demo", cwd=tmp_path)
