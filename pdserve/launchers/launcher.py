"""The interface of launchers, which start and stop instances somewhere: processes, containers, pods or actors; by URL."""

from typing import Any, Protocol
from urllib.parse import parse_qsl, urlsplit

from pdserve.errors import SetupError


class Launcher(Protocol):
    """Starts and stops single instances.

    Instances dial in to the routers by themselves, so a launcher reports nothing: the routers know which instances serve.
    Calls return once the platform has accepted the request, and do not wait for an instance to be ready or gone.
    """

    def start(self, role: str) -> None:
        """Start one instance with the role `prefill`, `decode` or `both`.

        Raises:
            SetupError: the platform refuses, in one line.
        """
        ...

    def stop(self, instance_id: str) -> None:
        """End one instance for good, after it has drained; another is not started in its place.

        Raises:
            SetupError: the platform refuses, or has no such instance, in one line.
        """
        ...


COMPOSE_OPTIONS = ("file", "project", "compose", "engine")
FORMS = "compose://?file=docker-compose.yml or kubernetes://NAMESPACE/RELEASE"


def launcher_of(url: str) -> Launcher:
    """Return the launcher that a URL names; the options of `compose://` are arguments of `ComposeLauncher`.

    Raises:
        SetupError: the URL has another form, or the platform cannot be reached.
    """
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise SetupError(f"--launcher {url!r} is not such as {FORMS}: {error}") from None
    release = parts.path.strip("/")
    if parts.scheme == "compose" and not (parts.netloc or release):
        from pdserve.launchers.compose import ComposeLauncher

        options: dict[str, Any] = dict(parse_qsl(parts.query, keep_blank_values=True))
        if unknown := options.keys() - COMPOSE_OPTIONS:
            raise SetupError(f"--launcher {url}: the options are {', '.join(COMPOSE_OPTIONS)}, not {min(unknown)}")
        return ComposeLauncher(**options)
    if parts.scheme == "kubernetes" and parts.netloc and release and "/" not in release and not parts.query:
        from pdserve.launchers.kubernetes import KubernetesLauncher

        return KubernetesLauncher(release, parts.netloc)
    raise SetupError(f"--launcher {url!r} is not such as {FORMS}")
