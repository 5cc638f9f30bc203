"""`pdserve up`: a complete deployment on this machine, until Ctrl-C."""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from pdserve.cli.deployment import Deployment, with_own_admin_key
from pdserve.cli.signals import set_on_signals
from pdserve.cli.supervisor import print_line
from pdserve.config import RouterConfig, UpConfig
from pdserve.errors import SetupError
from pdserve.settings import shared_settings
from pdserve.tools.load_config import AutoscaleConfig

POLL_S = 0.2
# Settings that the controller takes from the profile, or has with another meaning.
OF_PROFILE = ("connector", "model", "tensor_parallel_size", "slo", "profile", "prefill", "decode")


def up(config: UpConfig) -> None:
    """Serve until SIGINT or SIGTERM.

    Raises:
        SetupError: the connector, the port, the targets of --autoscale or a child process fail at start-up, or the package
            of an extra is missing.
    """
    from pdserve.kv_transfer.registry import connect
    from pdserve.kv_transfer.url import without_password
    from pdserve.router.web.listening import listen

    admin_key = ""
    if config.autoscale:
        check_controller(config)
        config, admin_key = with_own_admin_key(config)
    config.check_packages()  # instances would start before the routers do, which check theirs
    connect(config.connector)  # reports a wrong URL once, not once per child
    listen(
        RouterConfig(host=config.host, port=config.port)
    ).close()  # a foreign router there would pass the readiness check
    deployment = deployment_of(config, print_line)  # before the signal handlers: Ray installs its own
    stop = threading.Event()
    set_on_signals(stop)
    with deployment:
        counts = [(config.prefill, "prefill"), (config.decode, "decode"), (config.both, "both")]
        instances = " + ".join(f"{count} {role}" for count, role in counts if count)
        routers = "a router" if config.workers == 1 else f"{config.workers} routers"
        connector = without_password(deployment.connector)
        print(f"starting {routers} and {instances} on {config.model} over {connector}", flush=True)
        while not stop.is_set() and not deployment.poll_ready():
            stop.wait(POLL_S)
        if not stop.is_set():
            print(
                f"ready on {deployment.url}  (a dashboard in a browser; Ctrl-C stops)\n\n"
                f"  {curl_line(deployment.url, config.name, bool(config.api_key or config.keys_file))}\n",
                flush=True,
            )
        with _steered(config, deployment, stop, admin_key):
            while not stop.wait(POLL_S):
                deployment.check_children()
        print("stopping", flush=True)


@contextmanager
def _steered(config: UpConfig, deployment: Deployment, stop: threading.Event, admin_key: str) -> Iterator[None]:
    """Run the controller of --autoscale, if it is set, in a thread until `stop` is set."""
    if not config.autoscale:
        yield
        return
    from pdserve.tools.autoscaler.command import run

    with ThreadPoolExecutor(1, "autoscaler") as threads:
        controller = threads.submit(run, controller_config(config, deployment.routers), stop, deployment, admin_key)
        controller.add_done_callback(lambda _: stop.set())
        try:
            yield
        finally:
            stop.set()
        controller.result()


def check_controller(config: UpConfig) -> None:
    """Check the settings of the controller of --autoscale, which is made only once the fleet is ready.

    Raises:
        SetupError: one is wrong.
    """
    from pdserve.tools.planner.targets import parse_targets  # imports numpy

    try:
        controller_config(config, ())
        parse_targets(config.autoscale)
    except ValueError as error:
        raise SetupError(f"--autoscale: {error}") from None


def controller_config(config: UpConfig, routers: Iterable[str]) -> AutoscaleConfig:
    """Return the settings of the controller of --autoscale.

    Args:
        routers: their URLs.
    """
    settings = shared_settings(config, AutoscaleConfig)
    for name in OF_PROFILE:
        settings.pop(name)
    profile = config.profile or config.paced
    return AutoscaleConfig(**settings, router=",".join(routers), slo=config.autoscale, profile=profile, apply=True)


def deployment_of(config: UpConfig, on_line: Callable[[str], None]) -> Deployment:
    """Return the deployment, which passes each line that its children print to `on_line`.

    Raises:
        SetupError: the settings are inconsistent, or instances cannot run where they should.
    """
    deployment_class = Deployment
    if config.on == "ray":
        from pdserve.cli.ray_deployment import RayDeployment

        deployment_class = RayDeployment
    return deployment_class(config, on_line)


def curl_line(url: str, model: str, needs_key: bool = False) -> str:
    """Return a shell command that sends a short completion request; the key, which would be logged, is left to its user."""
    key = "-H 'Authorization: Bearer KEY' " if needs_key else ""
    body = f'{{"model":"{model}","prompt":"The capital of France is","max_tokens":8,"temperature":0}}'
    return f"curl {url}/v1/completions {key}-H 'Content-Type: application/json' -d '{body}'"
