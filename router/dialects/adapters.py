"""The endpoints that load and unload adapters while requests run, in vLLM's words."""

import asyncio
from typing import Annotated

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from pdserve.errors import BadRequest, InvalidParameter, NotFound, Unavailable
from pdserve.router.api.parsing import Body, JsonBody, parse_body
from pdserve.router.web.dialect import Dialect
from pdserve.router.web.endpoint import Access, endpoint, example

MAX_NAME_CHARS = 200
TIMEOUT_S = 300.0  # for all instances to answer
TEXT = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}


class LoadBody(Body):
    """Fields of /v1/load_lora_adapter; the path is that of a folder on the instances."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadBody(Body):
    """Fields of /v1/unload_lora_adapter."""

    lora_name: str


class AdapterEndpoints(Dialect):
    """Loads adapters on all instances that were started with --lora-folder, and unloads them."""

    tag = "adapters"

    @endpoint(
        "POST",
        "/v1/load_lora_adapter",
        Access.OPERATOR,
        json_only=True,
        response_class=Response,
        responses=TEXT,
    )
    async def load_lora_adapter(
        self, _: Request, body: Annotated[JsonBody[LoadBody], example(lora_name="sql", lora_path="sql")]
    ) -> Response:
        """Load an adapter, from a folder in --lora-folder; with load_inplace also in the place of another one."""
        fields = await asyncio.to_thread(parse_body, LoadBody, body)
        name = fields.lora_name
        if not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
            raise InvalidParameter("lora_name", f"lora_name must have 1 to {MAX_NAME_CHARS} printable characters")
        if not fields.lora_path:
            raise InvalidParameter("lora_path", "lora_path must be a folder, and is empty")
        if name == self.service.config.name:
            raise InvalidParameter("lora_name", f"{name!r} is the name of the model; choose another for the adapter")
        if name in self.service.model().adapters and not fields.load_inplace:
            advice = "If you want to load the adapter in place, set 'load_inplace' to True."
            message = f"The lora adapter '{name}' has already been loaded. {advice}"
            raise BadRequest(message, kind="adapter_exists", param="lora_name")
        await self._change(name, fields.lora_path, fields.load_inplace)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    @endpoint(
        "POST",
        "/v1/unload_lora_adapter",
        Access.OPERATOR,
        errors=[404],
        json_only=True,
        response_class=Response,
        responses=TEXT,
    )
    async def unload_lora_adapter(
        self, _: Request, body: Annotated[JsonBody[UnloadBody], example(lora_name="sql")]
    ) -> Response:
        """Unload an adapter. Requests that have it run to their end."""
        fields = await asyncio.to_thread(parse_body, UnloadBody, body)
        if fields.lora_name not in self.service.model().adapters:
            message = f"The lora adapter '{fields.lora_name}' cannot be found."
            raise NotFound(message, kind="adapter_not_found", param="lora_name")
        await self._change(fields.lora_name, "", False)
        return PlainTextResponse(f"Success: LoRA adapter '{fields.lora_name}' removed successfully.")

    async def _change(self, name: str, path: str, replaces: bool) -> None:
        """Wait until all instances have loaded or unloaded an adapter.

        Raises:
            BadRequest: one cannot.
            Unavailable: one does not answer; it may yet do it.
        """
        done: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def on_done(error: str) -> None:
            if not done.done():  # it may be too late
                done.set_result(error)

        self.service.backend.change_adapter(name, path, replaces, on_done)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                error = await done
        except TimeoutError:
            message = (
                f"not all instances have answered within {TIMEOUT_S:g} s; /v1/models has the adapters that are loaded"
            )
            raise Unavailable(message, kind="timeout") from None
        if error:
            raise BadRequest(error, kind="adapter_refused", param="lora_path" if path else "lora_name")
