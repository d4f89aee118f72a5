"""The application: its routes, and the errors of the framework in our shape."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

import dspark
from dspark.serve.api.answering import Answering, cancelled, disconnected
from dspark.serve.api.bodies import read_json
from dspark.serve.api.config import ApiConfig, ServedModel
from dspark.serve.api.errors import ApiError, bad_request, overloaded
from dspark.serve.api.front import Front
from dspark.serve.api.schemas import ChatRequest, CompletionRequest, read_body
from dspark.serve.api.service import AnyEngine, Service

WEB = Path(__file__).parent.parent / "web"
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def make_app(engine: AnyEngine, model: ServedModel, config: ApiConfig) -> tuple[ASGIApp, Service]:
    """The ASGI application over an engine, and its service. To be called in the event loop that will serve it."""
    service = Service(engine, model, config)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    app = FastAPI(
        title="dspark",
        version=dspark.__version__,
        docs_url=None,  # its page loads scripts from elsewhere
        redoc_url=None,
        lifespan=lifespan,
        redirect_slashes=False,
    )
    _add_errors(app)
    _add_generation(app, service)
    _add_measurements(app, service)
    _add_page(app)
    _add_docs(app)
    return Front(app, api_keys=config.api_keys, metrics=service.metrics), service


def _add_errors(app: FastAPI) -> None:
    async def ours(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        request.scope.setdefault("dspark", {}).setdefault("code", error.code)
        if error.param is not None:
            request.scope["dspark"].setdefault("param", error.param.partition(".")[0])
        return error.response()

    async def theirs(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        words = {404: "there is no such path", 405: "the path takes another method"}.get(error.status_code)
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        shaped = ApiError(error.status_code, words or str(error.detail), code=code, headers=error.headers)
        return await ours(request, shaped)

    async def invalid(request: Request, error: Exception) -> Response:
        return await ours(request, bad_request("the request is malformed"))

    app.add_exception_handler(ApiError, ours)
    app.add_exception_handler(HTTPException, theirs)
    app.add_exception_handler(RequestValidationError, invalid)


def _add_docs(app: FastAPI) -> None:
    """Let /openapi.json tell of the bodies, whose reading and checking is ours (:mod:`dspark.serve.api.bodies`)."""
    base = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = base()
            parts = document.setdefault("components", {}).setdefault("schemas", {})
            for path, kind in (("/v1/completions", CompletionRequest), ("/v1/chat/completions", ChatRequest)):
                schema = kind.model_json_schema(by_alias=True, ref_template="#/components/schemas/{model}")
                parts |= {**schema.pop("$defs", {}), kind.__name__: schema}
                content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}
                document["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI's manual has it


def _add_generation(app: FastAPI, service: Service) -> None:
    model, config = service.model, service.config

    def check_model(name: str) -> None:
        if name != model.name:
            message = f"there is no model of the name given; this server has {model.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        """Continue a text."""
        body = await read_json(request, config, partial(read_body, CompletionRequest))
        check_model(body.model)
        return Answering(service, body)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        """Answer a conversation."""
        body = await read_json(request, config, partial(read_body, ChatRequest))
        check_model(body.model)
        return Answering(service, body)

    def described() -> dict[str, Any]:
        return {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "dspark",
            "max_model_len": model.max_len,
        }

    @app.get("/v1/models")
    async def models() -> Response:
        """The one model."""
        return JSONResponse({"object": "list", "data": [described()]})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        """What is told of it."""
        check_model(name)
        return JSONResponse(described())


def _add_measurements(app: FastAPI, service: Service) -> None:
    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        """200 while requests are taken and worked on, 503 once they are not."""
        status = "stopping" if service.stopping.is_set() else "ok" if service.engine.healthy else "failed"
        return JSONResponse({"status": status}, status_code=200 if status == "ok" else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(service.metrics.text(), media_type=METRICS_TYPE)

    @app.get("/live/events")
    async def live() -> Response:
        """Server-sent events for the page."""
        if service.live.watchers >= service.config.max_live_clients:
            raise overloaded(service.config.retry_seconds, "as many pages are open as may be")
        return LiveStream(service)


def _add_page(app: FastAPI) -> None:
    @app.head("/", include_in_schema=False)
    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        """The live page."""
        return FileResponse(WEB / "index.html", headers={"cache-control": "no-cache"})

    @app.get("/favicon.ico", include_in_schema=False)
    async def icon() -> Response:
        """The page's sign."""
        return FileResponse(WEB / "icon.svg", media_type="image/svg+xml")

    app.mount("/static", StaticFiles(directory=WEB), name="static")


class LiveStream(Response):
    """The live page's stream, open until the page is closed or the server stops."""

    def __init__(self, service: Service) -> None:
        super().__init__()
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send messages as they come; a page that does not read is left behind, and dropped when it closes."""
        work = asyncio.create_task(self._send(send))
        gone = asyncio.create_task(disconnected(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancelled(work)
            await cancelled(gone)

    async def _send(self, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async with aclosing(self._service.live.watch(self._service.stopping)) as messages:
            async for message in messages:
                await send({"type": "http.response.body", "body": message.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
