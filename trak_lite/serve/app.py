"""The routes, and the application that a server runs."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qsl

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from trak_lite.errors import InvalidInputError, TrakLiteError
from trak_lite.serve.guard import PATIENCE, Guard
from trak_lite.serve.pages import Pages, Params, policy

__all__ = ["application"]

_MOST_FIELDS = 64
_FORM = "application/x-www-form-urlencoded"

Handler = Callable[[Request], Awaitable[Response]]


def application(pages: Pages, *, patience: float = PATIENCE) -> Guard:
    """Return the ASGI application of some pages. Pages are made in worker threads.

    No part of a path is used: what a page shows is in the parameters of its URL.

    Args:
        pages: The pages.
        patience: Seconds for a client to send a request.
    """
    routes = [
        Route("/", _page(pages.start)),
        Route("/review", _page(pages.review)),
        Route("/marks.csv", _table(pages)),
        Route("/ask", _post(pages, pages.ask), methods=["POST"]),
        Route("/mark", _post(pages, pages.mark), methods=["POST"]),
    ]

    async def failed(request: Request, error: Exception) -> Response:
        status, page = pages.problem(error)
        return HTMLResponse(page, status)

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        page = pages.message(
            f"{error.status_code} {error.detail}", "No page of this server answers this request."
        )
        return HTMLResponse(page, error.status_code, error.headers)

    handlers: Any = {TrakLiteError: failed, HTTPException: refused, Exception: failed}
    made: Any = Starlette(routes=routes, exception_handlers=handlers)
    return Guard(made, policy=policy(), patience=patience)


def _page(make: Callable[[Params], str]) -> Handler:
    """Return the handler of a page that only reads."""

    async def answer(request: Request) -> Response:
        return HTMLResponse(await run_in_threadpool(make, _params(request.query_params.multi_items())))

    return answer


def _params(pairs: list[tuple[str, str]]) -> dict[str, str]:
    """Return parameters by name; raise :class:`InvalidInputError` if one is given twice."""
    params: dict[str, str] = {}
    for name, value in pairs:
        if name in params:
            raise InvalidInputError(f"The parameter {name!r:.40} is given more than once. Give it once.")
        params[name] = value
    return params


def _table(pages: Pages) -> Handler:
    async def answer(request: Request) -> Response:
        headers = {"content-disposition": 'attachment; filename="relabelling.csv"'}
        return Response(await run_in_threadpool(pages.table), media_type="text/csv", headers=headers)

    return answer


def _post(pages: Pages, change: Callable[[Params], str]) -> Handler:
    """Return the handler of a form; it changes something and leads to a page."""

    async def answer(request: Request) -> Response:
        if request.headers.get("content-type", "").partition(";")[0].strip() != _FORM:
            return HTMLResponse(pages.message("415 Unsupported Media Type", f"Expected {_FORM}."), 415)
        try:
            text = (await request.body()).decode()
            pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=_MOST_FIELDS)
        except ValueError:
            return HTMLResponse(pages.message("400 Bad Request", "The form cannot be read."), 400)
        fields = _params(pairs)
        if not secrets.compare_digest(fields.pop("token", "").encode(), pages.token.encode()):
            said = "The form is not of this server, or of one that was restarted. Load the page again."
            return HTMLResponse(pages.message("403 Forbidden", said), 403)
        return RedirectResponse(await run_in_threadpool(change, fields), 303)

    return answer
