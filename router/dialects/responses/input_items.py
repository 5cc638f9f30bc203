"""The input of a stored response as items, in pages: what `GET /v1/responses/{id}/input_items` answers."""

from collections.abc import Mapping

from pdserve.errors import InvalidParameter
from pdserve.router.api.generation import Json
from pdserve.router.api.parsing import is_ascending, page_limit, quote
from pdserve.router.dialects.responses.response_store import StoredResponse


def page_of_items(stored: StoredResponse, query: Mapping[str, str]) -> Json:
    """Return a page of the messages before the response, those of the responses that it continues included.

    Args:
        query: `limit` from 1 to 100; `order`, `desc` for the newest first (the default) or `asc`; `after`, the id of an item.

    Raises:
        BadRequest: one of them is invalid.
    """
    limit, ascending = page_limit(query), is_ascending(query)
    items = [_item(f"msg_{stored.id}_{i}", message) for i, message in enumerate(stored.messages[:-1])]
    if not ascending:
        items.reverse()
    if "after" in query:
        ids = [item["id"] for item in items]
        if query["after"] not in ids:
            message = f"after must be the id of an item of this response; {quote(query['after'])} is none"
            raise InvalidParameter("after", message)
        items = items[ids.index(query["after"]) + 1 :]
    page = items[:limit]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return {"object": "list", "data": page, **ends, "has_more": len(page) < len(items)}


def _item(item_id: str, message: Json) -> Json:
    kind = "output_text" if message["role"] == "assistant" else "input_text"
    content = message.get("content") or ""
    texts = [content] if isinstance(content, str) else [part["text"] for part in content]  # type: ignore[attr-defined]
    parts = [{"type": kind, "text": text} | ({"annotations": []} if kind == "output_text" else {}) for text in texts]
    return {"id": item_id, "type": "message", "role": message["role"], "status": "completed", "content": parts}
