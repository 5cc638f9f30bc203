"""Fuzz a deployment of the demo model with Schemathesis, from its /openapi.json, beside attacks from outside.

Every response must conform to the schema and none may be a server error; every attack must be refused or served; the
processes must not grow in memory.

schema_fuzz.py [SECONDS [--tls]]   duration of each of two runs (default 60); memory growth is measured over the second
"""

import importlib.util
import subprocess
import sys
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path

import trustme
from attacking.judge import Attacks
from attacking.target import TIMEOUT_S

from pdserve.cli.deployment import Deployment, free_port
from pdserve.config import UpConfig

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
)
MAX_GROWTH_MIB = 24  # of the router: allows for its request log and allocator noise; a leaked body is larger
# Of an instance in all: what it starts with, its cache of grammars, two that arrive, and what malloc keeps of small ones.
MAX_INSTANCE_MIB = 400 + 128 + 64 + 128


def main(seconds: int, tls: bool) -> None:
    if importlib.util.find_spec("schemathesis") is None:
        sys.exit("Schemathesis is not installed: pip install schemathesis")
    # A short context limits the length of answers to requests that are valid by chance.
    config = UpConfig(model="demo", port=free_port(), max_model_len=96, num_blocks=512, threads=1)
    deployment = Deployment(config, on_line=lambda line: print(line, file=sys.stderr))
    with ExitStack() as stack:
        if tls:
            serve_over_tls(deployment, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        stack.enter_context(deployment)
        deployment.wait_ready(TIMEOUT_S)
        arguments = deployment.child("router").arguments
        control_port = int(arguments[arguments.index("--control-port") + 1])
        with Attacks(deployment.url, control_port) as attacks, ThreadPoolExecutor(1) as thread:
            attacking = thread.submit(attacks.run)
            try:
                run(deployment.url, seconds, attacking)
                before = resident_mib(deployment)
                run(deployment.url, seconds, attacking)
                after = resident_mib(deployment)
            finally:
                attacks.stopped.set()
            attacking.result()
    print(f"attacks: {dict(attacks.judged)}")
    print(f"attacks that failed while this process was stalled, and were not judged: {dict(attacks.unjudged)}")
    grown = {name: after[name] - before[name] for name in before}
    for name, growth in grown.items():
        print(f"{name}: {before[name]:.0f} MiB after the warm-up, {growth:+.1f} MiB since")
    if grown["router"] > MAX_GROWTH_MIB:
        sys.exit(f"the router grew by more than {MAX_GROWTH_MIB} MiB")
    if max(after.values()) > MAX_INSTANCE_MIB:
        sys.exit(f"an instance takes more than {MAX_INSTANCE_MIB} MiB")


def serve_over_tls(deployment: Deployment, folder: Path) -> None:
    """Have the router of a deployment, which has no flags for this, serve clients over TLS."""
    issued, router = trustme.CA().issue_cert("127.0.0.1"), deployment.child("router")
    issued.private_key_and_cert_chain_pem.write_to_path(folder / "all.pem")
    router.arguments += ["--ssl-certfile", f"{folder}/all.pem", "--ssl-keyfile", f"{folder}/all.pem"]
    deployment.url = deployment.url.replace("http:", "https:")
    deployment.routers = [deployment.url]


def run(url: str, seconds: int, attacking: "Future[None]") -> None:
    """Run Schemathesis; exit with its code if it found a failure, and raise what ended the attacks if they end before."""
    command = [
        sys.executable,
        "-m",
        "schemathesis.cli",
        "run",
        f"{url}/openapi.json",
        "--checks",
        ",".join(CHECKS),
        "--max-time",
        str(seconds),
    ]
    command += ["--tls-verify", "false", "--continue-on-failure", "--request-timeout", str(TIMEOUT_S)]
    command += ["--generation-database", "none", "--warnings", "off", "--suppress-health-check", "all"]
    with tempfile.TemporaryDirectory() as folder, subprocess.Popen(command, cwd=folder) as schemathesis:
        while schemathesis.poll() is None:
            wait([attacking], timeout=1)
            if attacking.done():
                schemathesis.terminate()
                attacking.result()
    if schemathesis.returncode:
        sys.exit(schemathesis.returncode)


def resident_mib(deployment: Deployment) -> dict[str, float]:
    """Return the resident memory of each process in MiB, by name, without the store's shared memory, which fills up."""
    sizes = {}
    for child in deployment.children:
        if not child.running:
            sys.exit(f"{child.name} has exited")
        status = Path(f"/proc/{child.pid}/status").read_text()
        sizes[child.name] = int(status.partition("RssAnon:")[2].split()[0]) / 1024
    return sizes


if __name__ == "__main__":
    arguments = [one for one in sys.argv[1:] if one != "--tls"]
    main(int(arguments[0]) if arguments else 60, tls="--tls" in sys.argv)
