"""Launchers by URL, as `--launcher` of `pdserve autoscale` names them."""

from typing import Any
from urllib.parse import parse_qsl, urlsplit

from pdserve.errors import SetupError
from pdserve.launchers.launcher import Launcher

COMPOSE_OPTIONS = ("file", "project", "compose", "engine")
FORMS = "compose://?file=docker-compose.yml or kubernetes://NAMESPACE/RELEASE"


def launcher_of(url: str) -> Launcher:
    """Return the launcher that a URL names; the options of `compose://` are arguments of `ComposeLauncher`.

    Raises:
        SetupError: the URL has another form, or the platform cannot be reached.
    """
    parts = urlsplit(url)
    release = parts.path.strip("/")
    if parts.scheme == "compose" and not (parts.netloc or release):
        from pdserve.launchers.compose import ComposeLauncher

        options: dict[str, Any] = dict(parse_qsl(parts.query))
        if unknown := options.keys() - COMPOSE_OPTIONS:
            raise SetupError(f"--launcher {url}: the options are {', '.join(COMPOSE_OPTIONS)}, not {min(unknown)}")
        return ComposeLauncher(**options)
    if parts.scheme == "kubernetes" and parts.netloc and release:
        from pdserve.launchers.kubernetes import KubernetesLauncher

        return KubernetesLauncher(release, parts.netloc)
    raise SetupError(f"--launcher {url!r} is not such as {FORMS}")
