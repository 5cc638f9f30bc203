"""`pdserve up`: a whole deployment on this machine until Ctrl-C."""

import signal
import threading

from pdserve.cli.deployment import Deployment
from pdserve.config import RouterConfig, UpConfig

TEND_S = 0.2


def up(config: UpConfig) -> None:
    """Serves until SIGINT or SIGTERM.

    Raises:
        SetupError: it cannot start.
    """
    from pdserve.kv_transfer.registry import connect
    from pdserve.router.web.listening import listen

    connect(config.connector)  # what is wrong with it is said once, not by every child
    listen(RouterConfig(host=config.host, port=config.port)).close()  # another router there would say that all is ready
    stop = threading.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda *_: stop.set())
    with Deployment(config, say=lambda line: print(line, flush=True)) as deployment:
        kinds = [(config.prefill, "prefill"), (config.decode, "decode"), (config.both, "both")]
        parts = " + ".join(f"{count} {kind}" for count, kind in kinds if count)
        routers = "a router" if config.workers == 1 else f"{config.workers} routers"
        print(f"starting {routers} and {parts} on {config.model} over {deployment.connector}", flush=True)
        while not stop.is_set() and not deployment.poll_ready():
            stop.wait(TEND_S)
        if not stop.is_set():
            print(
                f"ready on {deployment.url}  (Ctrl-C stops; in a browser it shows what happens)\n\n"
                f"  {curl_line(deployment.url, config.name)}\n",
                flush=True,
            )
        while not stop.wait(TEND_S):
            deployment.tend()
        print("stopping", flush=True)


def curl_line(url: str, model: str) -> str:
    """A request to copy and paste."""
    body = f'{{"model":"{model}","prompt":"The capital of France is","max_tokens":8,"temperature":0}}'
    return f"curl {url}/v1/completions -H 'Content-Type: application/json' -d '{body}'"
