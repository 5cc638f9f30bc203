"""Other routers, in their own environments made by `peers/install`, and their back ends."""

import json
import sys
from pathlib import Path
from typing import NamedTuple

from pdserve.errors import SetupError
from pdserve.model_path import resolve_model

SERVER = Path(__file__).parent / "mock_server.py"
PEERS = ("nginx", "smg", "vllm_router", "sglang_router", "dynamo", "litellm")
MODEL = "demo"
DYNAMO = {"DYN_DISCOVERY_BACKEND": "file", "DYN_REQUEST_PLANE": "tcp", "DYN_EVENT_PLANE": "zmq", "DYN_LOG": "error"}
LITELLM = {
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOG": "ERROR",
}
NGINX = """
daemon off; master_process off; error_log stderr error; pid {work}/pid; events {{ worker_connections 1024; }}
http {{
  access_log off; keepalive_requests 1000000000; client_max_body_size 4m; client_body_buffer_size 1m;
  client_body_temp_path {work}; proxy_temp_path {work}; fastcgi_temp_path {work}; uwsgi_temp_path {work};
  scgi_temp_path {work};
  upstream mocks {{ {servers} keepalive 64; keepalive_requests 1000000000; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://mocks; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    }}
  }}
}}
"""


class Peer(NamedTuple):
    """Commands to start, and their environment variables."""

    router: list[str]
    backend: list[str]
    environment: dict[str, str]


def peer(name: str, folder: str, work: Path, ports: tuple[int, int], mocks: list[int]) -> Peer:
    """Return one router process in front of servers that answer at once on the ports `mocks`.

    It uses its default routing, except that Dynamo's front end routes by KV.

    Args:
        work: an empty folder.
        ports: for clients, and for metrics if they have a separate port.

    Raises:
        SetupError: the peer is unknown or not installed.
    """
    programs = Path(folder) / name / ("usr/sbin" if name == "nginx" else "bin")
    if name not in PEERS or not programs.is_dir():
        raise SetupError(
            f"--peers {name}: there is {', '.join(PEERS)}, once installed: benchmarks/peers/install FOLDER {name}, "
            "then --peers-folder FOLDER"
        )
    port, metrics = ports
    urls = [f"http://127.0.0.1:{mock}" for mock in mocks]
    listen = ["--host", "127.0.0.1", "--port", str(port)]
    backend, environment = [sys.executable, str(SERVER), *map(str, mocks)], dict[str, str]()
    match name:
        case "nginx":
            servers = " ".join(f"server 127.0.0.1:{mock};" for mock in mocks)
            (work / "conf").write_text(NGINX.format(work=work, port=port, servers=servers))
            router = ["nginx", "-c", str(work / "conf")]
        case "vllm_router":
            router = ["vllm-router", *listen, "--worker-urls", *urls, "--log-level", "error"]
        case "smg" | "sglang_router":
            start = ["smg", "launch"] if name == "smg" else ["python", "-m", "sglang_router.launch_router"]
            router = [*start, *listen, "--worker-urls", *urls, "--log-level", "error"]
            router += ["--prometheus-port", str(metrics)]
        case "litellm":
            models = [
                {
                    "model_name": MODEL,
                    "litellm_params": {
                        "model": f"text-completion-openai/{MODEL}",
                        "api_base": f"{url}/v1",
                        "api_key": "-",
                    },
                }
                for url in urls
            ]
            (work / "config.yaml").write_text(json.dumps({"model_list": models}))
            router = ["litellm", *listen, "--config", str(work / "config.yaml"), "--telemetry", "False"]
            environment = LITELLM
        case _:
            router = ["python", "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port)]
            router += ["--router-mode", "kv"]
            backend = [str(programs / "python"), "-m", "dynamo.mocker", "--model-path", str(resolve_model(MODEL))]
            backend += ["--model-name", MODEL, "--speedup-ratio", "1000000", "--block-size", "16"]
            backend += ["--num-workers", str(len(mocks))]
            environment = DYNAMO | {"DYN_FILE_KV": str(work), "HF_HUB_OFFLINE": "1"}
    return Peer([str(programs / router[0]), *router[1:]], backend, environment)
