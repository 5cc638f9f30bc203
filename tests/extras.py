"""Python code for processes in which the packages of extras cannot be imported."""

BLOCKED = ["grpc", "grpc_health", "grpc_reflection", "zmq", "redis", "python_multipart", "fastapi_offline"]
BLOCKED += ["opentelemetry.sdk"]
BLOCK_EXTRAS = f"import sys; sys.modules.update(dict.fromkeys({BLOCKED}))\n"
MAIN = "from pdserve.cli.commands import main; main()\n"  # pdserve, with the arguments of the process
