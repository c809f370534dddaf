"""Stored responses of `/v1/responses`: read, listed and deleted by their client."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from serving.api.http.connection.keys import sent_key
from serving.api.http.connection.streaming import answer
from serving.api.http.context import context_of
from serving.api.http.protocol.responses import DeletedResponse, InputItems, ResponseObject

router = APIRouter(tags=["OpenAI"])


@router.get("/v1/responses/{response_id}", response_model=ResponseObject)
async def get_response(response_id: str, request: Request) -> Response:
    """A stored response."""
    stored = context_of(request).store.find(response_id, sent_key(request.headers))
    return Response(stored.response, media_type="application/json")


@router.get("/v1/responses/{response_id}/input_items", response_model=InputItems)
async def list_input_items(
    response_id: str,
    request: Request,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    """The input of a stored response, `limit` items at a time."""
    stored = context_of(request).store.find(response_id, sent_key(request.headers))
    items = [
        item if isinstance(item.get("id"), str) else {**item, "id": f"in_{place}_{response_id}"}
        for place, item in enumerate(stored.items)
    ]
    items = items[:: 1 if order == "asc" else -1]
    begin = next((place for place, item in enumerate(items, 1) if item["id"] == after), 0)
    shown = items[begin : begin + limit]
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {}
    return answer(InputItems(data=shown, has_more=begin + limit < len(items), **ends))


@router.delete("/v1/responses/{response_id}", response_model=DeletedResponse)
async def delete_response(response_id: str, request: Request) -> Response:
    """Delete a stored response."""
    context_of(request).store.delete(response_id, sent_key(request.headers))
    return answer(DeletedResponse(id=response_id, object="response", deleted=True))
