"""`pdserve …` in processes of their own, without the seconds that each would spend on importing torch and the like.

    python fork_server.py DESCRIPTOR

imports what instances and routers import, and then reads requests from a socket: a JSON list of arguments and environment,
with three descriptors, for what the command prints, for its errors, and for its pid and, once it has ended, its return
code, a line each. For each request it forks a keeper, which forks the command and waits for it.
"""

import ctypes
import json
import os
import signal
import socket
import sys

PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def main() -> None:
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        arguments = wait_for_command(requests)
    if arguments is not None:
        import pdserve.cli

        sys.argv[:] = ["pdserve", *arguments]
        pdserve.cli.main()


def wait_for_command(requests: socket.socket) -> list[str] | None:
    """Returns its arguments in a process that is to run it; None in this one, once nobody can ask any more."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the keepers
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, 1 << 17, 3)
        if not message:
            return None
        output, errors, status = descriptors
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            requests.close()
            if (child := os.fork()) == 0:
                os.close(status)
                return become(output, errors, *json.loads(message))
            os.close(output)
            os.close(errors)
            keep(child, status)
        for descriptor in descriptors:
            os.close(descriptor)


def keep(child: int, status: int) -> None:
    """Does not return."""
    _die_with_parent(signal.SIGKILL)
    try:
        os.write(status, f"{child}\n".encode())
        os.write(status, f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n".encode())
    finally:
        os._exit(0)


def become(output: int, errors: int, arguments: list[str], environment: dict[str, str]) -> list[str]:
    os.setsid()
    _die_with_parent(signal.SIGTERM)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(output, 1)
    os.dup2(errors, 2)
    os.close(output)
    os.close(errors)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[1:1] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    return arguments


def _die_with_parent(by: signal.Signals) -> None:
    _LIBC.prctl(PR_SET_PDEATHSIG, by)


if __name__ == "__main__":
    _die_with_parent(signal.SIGTERM)
    import transformers.models.llama.modeling_llama  # noqa: F401

    import pdserve.router.server
    import pdserve.serve_instance  # noqa: F401

    main()
