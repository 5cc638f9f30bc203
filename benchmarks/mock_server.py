"""A completions server over HTTP that answers at once: the baseline without a router in `router.py`.

    python benchmarks/mock_server.py PORT…

All other paths return a list of models, which other routers request from their back ends.
"""

import asyncio
import json
import sys

import uvloop

CHOICE = b'"choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":null}]'
EVENT = b'data: {"id":"cmpl-0","object":"text_completion","created":0,"model":"demo",' + CHOICE + b"}\n\n"
MODELS = b'{"object":"list","data":[{"id":"demo","object":"model"}],"model_path":"demo"}'
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: "
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer the requests of one connection until the client closes it."""
    while True:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            writer.close()
            return
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0] or 0)
        content = await reader.readexactly(length)
        if b"/v1/completions " not in head:
            writer.write(b"%b%d\r\n\r\n%b" % (WHOLE, len(MODELS), MODELS))
            continue
        body = json.loads(content)
        tokens = body["max_tokens"]
        if body["stream"]:
            writer.write(STREAM)
            for event in (*[EVENT] * tokens, b"data: [DONE]\n\n"):  # one write per token
                writer.write(b"%x\r\n%b\r\n" % (len(event), event))
            writer.write(b"0\r\n\r\n")
        else:
            text, usage = " word" * tokens, {"completion_tokens": tokens}
            answer = json.dumps({"id": "cmpl-0", "choices": [{"index": 0, "text": text}], "usage": usage}).encode()
            writer.write(b"%b%d\r\n\r\n%b" % (WHOLE, len(answer), answer))


async def main(ports: list[int]) -> None:
    servers = [await asyncio.start_server(serve, "127.0.0.1", port) for port in ports]
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    uvloop.run(main([int(port) for port in sys.argv[1:]]))
