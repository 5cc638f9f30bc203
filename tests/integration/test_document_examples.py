"""Examples of the documents, sent to a fleet of the demo model as they stand on the page."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

ROOT = Path(__file__).parents[2]
URL = "http://localhost:8000"


def fences(name: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / name).read_text(), re.M | re.S)


def examples() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield path and body of each request that a document sends by curl."""
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        for script in fences(document.relative_to(ROOT).as_posix(), "sh"):
            for path, body in re.findall(r"curl (?:-N )?localhost:8000(/\S+) -d ('[^']*')", script):
                yield path, json.loads(shlex.split(body)[0])


@pytest.fixture(scope="module")
def url(deploy: Any) -> Iterator[str]:
    with deploy(model="demo", prefill=1, decode=1) as deployment:
        yield deployment.url


def test_requests_are_answered(url: str) -> None:
    requests = list(examples())
    assert len(requests) >= 4
    for path, body in requests:
        answer = httpx.post(f"{url}{path}", json=body)
        assert answer.status_code == 200 and '"error"' not in answer.text, answer.text


def test_the_answer_on_the_page_is_that_of_today(url: str) -> None:
    (script, *_), (shown, *_) = fences("docs/api.md", "sh"), fences("docs/api.md", "json")
    (body,) = re.findall(r"-d '([^']*)'", script)
    answer, expected = httpx.post(f"{url}/v1/completions", content=body).json(), json.loads(shown)
    assert answer.keys() == expected.keys()
    assert answer["choices"] == expected["choices"]
    del (
        answer["usage"]["prompt_tokens_details"],
        expected["usage"]["prompt_tokens_details"],
    )  # the second time it is a hit
    assert expected["usage"].items() <= answer["usage"].items()


def test_the_client_of_the_readme_gets_an_answer(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = [one for one in fences("README.md", "python") if "OpenAI" in one]
    assert f"{URL}/v1" in code
    exec(compile(code.replace(URL, url), "README.md", "exec"), {})
    assert "Rome" in capsys.readouterr().out
