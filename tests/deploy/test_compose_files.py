"""The Compose files agree with the image and the command line. No GPU has run docker-compose.yml."""

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
import yaml

from pdserve.cli.deployment import free_port

ROOT = Path(__file__).parents[2]


def services(file: str) -> Any:
    return yaml.safe_load((ROOT / file).read_text())["services"]


def test_stores_of_the_two_files() -> None:
    """Shared memory between the GPUs of a host, which the base file mounts; Redis without GPUs, and as the choice."""
    cpu, gpu = services("docker-compose.cpu.yml"), services("docker-compose.yml")
    for role in ("prefill", "decode"):
        assert cpu[role]["environment"]["PDSERVE_CONNECTOR"] == "${CONNECTOR:-redis://redis:6379/0}"
        assert gpu[role]["environment"]["PDSERVE_CONNECTOR"].startswith("${CONNECTOR:-shm://")
        assert "--connector" not in cpu[role]["command"], "a flag would win over the variable"
        assert any(volume.startswith("shm:/dev/shm") for volume in cpu[role]["volumes"])


def test_each_pool_has_gpus_and_a_number_of_them_per_instance() -> None:
    """Each service passes its list of GPUs and its number of ranks to the entry point, and reserves all GPUs."""
    for role in ("prefill", "decode"):
        service = services("docker-compose.yml")[role]
        assert service["environment"]["GPUS"].startswith(f"${{{role.upper()}_GPUS:-")
        assert service["environment"]["TENSOR_PARALLEL_SIZE"] == f"${{{role.upper()}_TENSOR_PARALLEL_SIZE:-1}}"
        assert service["deploy"]["resources"]["reservations"]["devices"][0]["count"] == "all"


def test_compiled_kernels_are_kept_in_a_volume_that_the_user_of_the_image_may_write() -> None:
    image = (ROOT / "Dockerfile").read_text()
    folders = re.findall(r"(?:TRITON|TORCHINDUCTOR)_CACHE_DIR=(\S+)", image)
    assert len(folders) == 2
    for role in ("prefill", "decode"):
        mounted = [volume.partition(":")[2] for volume in services("docker-compose.yml")[role]["volumes"]]
        assert all(any(folder.startswith(f"{mount}/") for mount in mounted) for folder in folders)
    owned = re.search(r"install -d -o pdserve -g pdserve (.*)", image)
    assert owned is not None and "/cache" in owned[1].split()


@pytest.mark.parametrize("gpus", ["GPU-a,GPU-b", "MIG-GPU-a/1/0,MIG-GPU-a/2/0"])
def test_containers_take_gpus_and_slices_in_turn(gpus: str, tmp_path: Path) -> None:
    """Two run at a time and see one each, by any id of CUDA; a third finds none."""
    (tmp_path / "locks").mkdir()
    (tmp_path / "pdserve").write_text("#!/bin/sh\necho $CUDA_VISIBLE_DEVICES; exec sleep 60\n")
    (tmp_path / "pdserve").chmod(0o755)
    script = tmp_path / "entrypoint"
    script.write_text((ROOT / "scripts/entrypoint").read_text().replace("/run/gpus", str(tmp_path / "locks")))
    environment = {"GPUS": gpus, "PATH": f"{tmp_path}:/usr/bin:/bin"}
    running = []
    try:
        for expected in gpus.split(","):
            running.append(
                subprocess.Popen(["sh", str(script), "decode"], env=environment, stdout=subprocess.PIPE, text=True)
            )
            assert running[-1].stdout is not None
            assert running[-1].stdout.readline().strip() == expected
        third = subprocess.run(
            ["sh", str(script), "decode"], env=environment, capture_output=True, text=True, check=False
        )
        assert third.returncode == 2 and "every GPU" in third.stderr
    finally:
        for process in running:
            process.kill()
            process.communicate()


def filled_in(value: Any, variables: Mapping[str, str]) -> str:
    """Return a value with its `${NAME:-default}` replaced, as Compose does."""
    return re.sub(r"\$\{(\w+):-([^}]*)\}", lambda match: variables.get(match[1]) or match[2], str(value))


def test_keys_and_certificates_reach_the_router(
    tmp_path: Path, fork_server: Any, pdserve: Callable[..., "subprocess.CompletedProcess[str]"]
) -> None:
    """The service's command, started with its environment: 401 without the key, over TLS, healthy by its own check."""
    trustme.CA().issue_cert("example.org").private_key_and_cert_chain_pem.write_to_path(tmp_path / "all.pem")
    port, control_port = str(free_port()), str(free_port())
    tls = f"--ssl-certfile {tmp_path}/all.pem --ssl-keyfile {tmp_path}/all.pem"
    keys = {"PDSERVE_API_KEY": "sk-a", "PDSERVE_ADMIN_KEY": "adm", "PDSERVE_CONTROL_TOKEN": "secret"}
    variables = {**keys, "SCHEME": "https", "ROUTER_FLAGS": tls}
    router = services("docker-compose.cpu.yml")["router"]
    environment = {name: filled_in(value, variables) for name, value in router["environment"].items()}
    command = [filled_in(part, variables).replace("0.0.0.0", "127.0.0.1") for part in router["command"]]
    command += [*shlex.split(environment["FLAGS"]), "--port", port, "--control-port", control_port]
    check = [filled_in(part, variables).replace("8000", port) for part in router["healthcheck"]["test"][2:]]
    process = fork_server.start(command, environment, 1, 2)
    try:
        with httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=False, timeout=600) as client:
            while True:
                assert process.poll() is None
                try:
                    if client.get("/health").status_code == 200:
                        break
                except httpx.TransportError:
                    time.sleep(0.1)
            assert client.get("/v1/models").status_code == 401
            assert client.get("/v1/models", headers={"Authorization": "Bearer sk-a"}).status_code == 200
            assert client.get("/debug/instances").status_code == 401
            ready = client.get("/debug/instances", headers={"Authorization": "Bearer adm"})
            assert ready.status_code == 200
            done = pdserve(*check)
            assert done.returncode == 1 and "no decode instance" in done.stderr, "it speaks TLS"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(600)


@pytest.mark.parametrize("status", [200, 503])
def test_an_instance_is_as_healthy_as_it_says_whatever_the_proxy(status: int) -> None:
    """Docker puts the proxies of its configuration into the environment of each container."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/ready" else 404)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request, daemon=True)
        thread.start()
        check = services("docker-compose.cpu.yml")["prefill"]["healthcheck"]["test"][2:]
        command = [sys.executable, *(part.replace("9100", str(server.server_port)) for part in check)]
        proxies = dict.fromkeys(("http_proxy", "HTTP_PROXY"), "http://127.0.0.1:9")
        done = subprocess.run(command, env=os.environ | proxies, capture_output=True, check=False)
        thread.join(10.0)
    assert (done.returncode == 0) is (status == 200), done.stderr
    assert not thread.is_alive(), "it was asked"


@pytest.mark.parametrize(
    ("keys", "in_file", "sent"),
    [("", "", ""), ("adm", "", "adm"), ("o'ne\"#,two", "", "o'ne\"#"), ("adm", "other,third", "other")],
)
def test_prometheus_sends_the_first_admin_key(keys: str, in_file: str, sent: str, tmp_path: Path) -> None:
    """Without it, a router with API keys leaves out the series of each key. Its service's script, started with a fake."""
    service = services("docker-compose.cpu.yml")["prometheus"]
    (tmp_path / "prometheus").write_text("#!/bin/sh\n")
    (tmp_path / "prometheus").chmod(0o755)
    variables = {"PDSERVE_ADMIN_KEY": keys, "SCHEME": "https"}
    environment = {name: filled_in(value, variables) for name, value in service["environment"].items()}
    script = filled_in(service["command"][0], variables).replace("$$", "$").replace("/tmp/", f"{tmp_path}/")
    script = script.replace("/secrets/", f"{tmp_path}/secrets/")
    if in_file:
        (tmp_path / "secrets").mkdir()
        (tmp_path / "secrets" / "admin-key").write_text(f"{in_file}\n")
    subprocess.run(["sh", "-c", script], env={**environment, "PATH": f"{tmp_path}:/usr/bin:/bin"}, check=True)
    (job,) = yaml.safe_load((tmp_path / "prometheus.yml").read_text())["scrape_configs"]
    assert Path(job["authorization"]["credentials_file"]).read_text() == sent
    assert job["scheme"] == "https" and job["static_configs"] == [{"targets": ["router:8000"]}]


def test_the_control_token_reaches_every_instance() -> None:
    for role in ("router", "prefill", "decode"):
        environment = services("docker-compose.cpu.yml")[role]["environment"]
        assert environment["PDSERVE_CONTROL_TOKEN"] == "${PDSERVE_CONTROL_TOKEN:-}"


def test_settings_are_documented() -> None:
    """Each variable that a Compose file reads is in .env.example, and in the table of docs/deploy.md."""
    for file in ("docker-compose.cpu.yml", "docker-compose.yml"):
        read = set(re.findall(r"(?<!\$)\$\{(\w+):-", (ROOT / file).read_text()))
        assert read <= set(re.findall(r"^# (\w+)=", (ROOT / ".env.example").read_text(), re.MULTILINE)) | {
            "PROMETHEUS_PUBLISH",
            "GRAFANA_PUBLISH",
        }
        assert read <= set(re.findall(r"`(\w+)`", (ROOT / "docs/deploy.md").read_text()))


def test_containers_may_change_only_what_they_must() -> None:
    """Their root file systems are read-only, they have no capabilities, and all have a limit of memory to be set."""
    for name, service in services("docker-compose.cpu.yml").items():
        if name in ("prometheus", "grafana"):
            continue
        assert service["read_only"] and service["cap_drop"] == ["ALL"]
        if "pdserve" in service["image"]:  # importing torch makes this folder
            assert service["environment"]["TORCHINDUCTOR_CACHE_DIR"].startswith(f"{service['tmpfs'][0]}/")
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["mem_limit"].endswith(":-0}") and any(":/secrets:ro" in one for one in service["volumes"])


def test_images_of_others_are_pinned() -> None:
    images = {one["image"] for one in services("docker-compose.cpu.yml").values()}
    assert len(images) == 4
    for image in images - {"pdserve:${TAG:-latest}"}:
        assert re.fullmatch(r"\$\{\w+:-[\w/]+:v?\d+\.[\d.]+\}", image), image
