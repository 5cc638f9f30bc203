"""Files of reports."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from pdserve.cli.commands import app
from pdserve.errors import SetupError
from pdserve.tools.bench.report import check_files


@pytest.mark.parametrize(
    "arguments",
    [
        ["bench", "serve", "--base-url", "http://127.0.0.1:1", "--html"],
        ["bench", "serve", "--base-url", "http://127.0.0.1:1", "--csv"],
        ["bench", "serve", "--base-url", "http://127.0.0.1:1", "--save-result", "--result-filename"],
        ["bench", "latency", "--model", "/nowhere", "--output-json"],
        ["simulate", "--profile", "/nowhere", "--json"],
        ["simulate", "--profile", "/nowhere", "--csv"],
        ["plan", "--profile", "/nowhere", "--slo", "ttft.p90=1s", "--json"],
        ["plan", "--profile", "/nowhere", "--slo", "ttft.p90=1s", "--html"],
        ["plan", "--profile", "/nowhere", "--slo", "ttft.p90=1s", "--apply"],
        ["profile", "--from-fleet", "http://127.0.0.1:1", "--output"],
    ],
    ids=lambda arguments: " ".join((*arguments[:2], arguments[-1])),
)
def test_a_file_that_cannot_be_written_is_reported_before_anything_else(arguments: list[str], tmp_path: Path) -> None:
    """It would be a pity after an hour of measuring."""
    (tmp_path / "file").touch()
    result = CliRunner().invoke(app, [*arguments, str(tmp_path / "file" / "report")], standalone_mode=False)
    assert isinstance(result.exception, SetupError), result.output
    message = str(result.exception)
    assert message.startswith(f"{tmp_path}/file/report") and "cannot be written: " in message


def test_files_that_can_be_written_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("content")
    check_files(str(tmp_path / "old"), str(tmp_path / "folder" / "new"), "")
    assert (tmp_path / "old").read_text() == "content" and not list((tmp_path / "folder").iterdir())
