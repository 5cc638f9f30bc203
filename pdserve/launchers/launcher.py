"""The interface of launchers, which start and stop instances somewhere: processes, containers, pods or actors."""

from typing import Protocol


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
