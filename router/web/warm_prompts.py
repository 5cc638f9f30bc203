"""Warm prompts: each instance computes them when it has attached and after a reset, and pins their blocks in its pool."""

import asyncio
import json
import logging
from collections.abc import Sequence
from typing import Any

from msgspec import structs

from pdserve.costs import attention_pairs
from pdserve.errors import RequestError, SetupError, reason
from pdserve.lines.json_lines import json_lines
from pdserve.lines.untrusted import read_json
from pdserve.proto import pdserve_pb2 as pb
from pdserve.request import PIN_SINCE, SamplingParams
from pdserve.router.api.chat import parse_chat
from pdserve.router.api.parsing import parse_body
from pdserve.router.api.requests import parse_completion
from pdserve.router.api.schemas import ChatBody, CompletionBody
from pdserve.router.backend import ModelInfo
from pdserve.router.dispatch.dispatcher import Dispatcher
from pdserve.router.instances.fleet import InstanceHandle
from pdserve.router.limits.key_file import ANONYMOUS, ApiKey
from pdserve.router.routed_request import RoutedRequest
from pdserve.router.scheduling.policy import Load
from pdserve.router.text.tokenizer import Tokenizer
from pdserve.router.web.admission import AdmissionController

log = logging.getLogger(__name__)
POLL_S = 0.2  # between two looks for instances that have attached
ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1)
Line = tuple[int, dict[str, Any]]  # its number and its body


def read_warm_prompts(path: str, keys: Sequence[ApiKey]) -> list[Line]:
    """Return the bodies in a file of --warm-prompts, with their line numbers.

    Raises:
        SetupError: it cannot be read, a line is neither a prompt nor a chat body, or no key could use the KV.
    """
    if any(key.kv_salt for key in keys):
        raise SetupError("--warm-prompts need --share-kv: each key of the --keys-file has KV of its own")
    try:
        with open(path, encoding="utf-8") as file:
            lines = [(number, read_json(line)) for number, line in json_lines(file.read())]
    except (OSError, ValueError) as error:
        raise SetupError(f"--warm-prompts {path} cannot be read: {reason(error)}") from error
    bodies = [(number, {"prompt": value} if isinstance(value, str) else value) for number, value in lines]
    for number, body in bodies:
        if not isinstance(body, dict) or ("messages" in body) is ("prompt" in body):
            raise SetupError(
                f"--warm-prompts {path}, line {number}: write a string, or an object with messages or prompt"
            )
    return bodies


class WarmPrompts:
    """Sends the prompts to instances. Their load counts, but they are no requests of clients, and in no metric of these."""

    def __init__(
        self, bodies: Sequence[Line], tokenizer: Tokenizer, dispatcher: Dispatcher, admission: AdmissionController
    ) -> None:
        self._bodies, self._tokenizer, self._dispatcher, self._admission = bodies, tokenizer, dispatcher, admission
        self._told = set[tuple[int, str]]()

    async def run(self) -> None:
        """Keep all attached instances warm, until cancelled."""
        fleet, warm = self._dispatcher.fleet, set[tuple[InstanceHandle, int]]()
        while True:
            due = {(one, fleet.cache_epoch) for one in fleet.instances.values()}
            info, salt, new = self._dispatcher.model, self._admission.kv_salts[ANONYMOUS], due - warm
            if new and info is not None:
                requests = await asyncio.to_thread(self._parse, info, salt)
                for instance, epoch in new:
                    if fleet.cache_epoch == epoch and fleet.instances.get(instance.id) is instance:
                        _send(instance, epoch, requests)
                warm = due
            await asyncio.sleep(POLL_S)

    def _parse(self, info: ModelInfo, salt: str) -> list[RoutedRequest]:
        requests = []
        for number, body in self._bodies:
            fields = {"model": info.name, **body, "max_tokens": 1, "n": 1, "stream": False}
            fields.pop("max_completion_tokens", None)
            draft = RoutedRequest(request_id=f"warm-{number}", prompt=(), sampling=ONE_TOKEN, salt=salt, pin=True)
            raw = json.dumps(fields).encode()
            try:
                if "messages" in body:
                    generation = parse_chat(parse_body(ChatBody, raw), draft, self._tokenizer, info, 1)
                else:
                    generation = parse_completion(parse_body(CompletionBody, raw), draft, self._tokenizer, info, 1)
            except RequestError as error:
                if (number, str(error)) not in self._told:  # each time that an instance attaches
                    log.warning("--warm-prompts, line %d: %s", number, error)
                self._told.add((number, str(error)))
                continue
            requests += [structs.replace(one, sampling=ONE_TOKEN) for one in generation.requests]
        return requests


def _send(instance: InstanceHandle, epoch: int, requests: Sequence[RoutedRequest]) -> None:
    for request in requests:
        tokens, name = len(request.prompt), f"{request.request_id}#{epoch:x}"
        instance.assign(name, Load(1, tokens, 1, tokens, prefills=1, attended_tokens=int(attention_pairs(tokens, 0))))
        known = structs.replace(request, pin=instance.hello.protocol_version >= PIN_SINCE)
        submit = pb.Submit(request_id=name, phase=pb.BOTH, request=known.pack())
        instance.connection.send(pb.RouterFrame(submit=submit))
    log.info("%s computes %d warm prompts", instance.id, len(requests))
