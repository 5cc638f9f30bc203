"""Launchers by URL."""

import pytest

from pdserve.errors import SetupError
from pdserve.launchers.compose import ComposeLauncher
from pdserve.launchers.launcher import launcher_of


def test_compose_takes_its_options() -> None:
    assert isinstance(launcher_of("compose://"), ComposeLauncher)
    assert isinstance(launcher_of("compose://?file=docker-compose.cpu.yml&compose=podman-compose"), ComposeLauncher)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("compose", "'compose' is not such as compose://"),
        ("compose://host", "is not such as"),
        ("compose://?files=a", "the options are file, project, compose, engine, not files"),
        ("kubernetes://namespace", "kubernetes://NAMESPACE/RELEASE"),
        ("kubernetes://namespace/release/more", "kubernetes://NAMESPACE/RELEASE"),
        ("kubernetes://namespace/release?context=other", "kubernetes://NAMESPACE/RELEASE"),
        ("kubernetes://[namespace/release", "is not such as .*: Invalid IPv6 URL"),
        ("kubernetes://namespace/release", "no credentials for Kubernetes"),
    ],
)
def test_other_urls_are_refused(url: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    with pytest.raises(SetupError, match=reason):
        launcher_of(url)
