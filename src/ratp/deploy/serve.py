"""An HTTP server for a deployment; the only module that imports FastAPI and uvicorn.

A request is one image, as the body. Nothing that a client sends is used as a path.
"""

from __future__ import annotations

import asyncio
import hmac
import socket
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from ratp._core.environment import usable_cores
from ratp.data.decode.pixels import BadImage
from ratp.deploy.batches import Batches
from ratp.deploy.deployment import Deployment
from ratp.deploy.images import decode_image
from ratp.deploy.model import AnswerError
from ratp.deploy.page import Counts, html_page, metrics
from ratp.errors import ConfigError, RatpError, printable

try:
    import uvicorn
    from fastapi import FastAPI, HTTPException, Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
    from starlette.requests import ClientDisconnect
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as error:
    raise ConfigError(
        'ratp serve needs FastAPI and uvicorn, which are not here: pip install "ratp-cdsl[serve]"'
    ) from error

# Connections at once, images in work at once, and seconds for the head of a request.
CONNECTIONS, IN_WORK, HEAD_SECONDS = 256, 64, 10.0
_CLIENTS = 10_000  # whose rates are remembered
_PATHS = "/", "/healthz", "/metrics", "/versions", "/predict", "/observe", "/rollback", "/adapt"
_SAFE = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True)
class Limits:
    """What a client may ask for.

    Attributes:
        max_bytes: Size of an image file.
        max_pixels: Pixels of an image.
        rate: Requests per second and client address, on average over a second.
        timeout: Seconds within which a request must have arrived.
    """

    max_bytes: int = 20_000_000
    max_pixels: int = 50_000_000
    rate: float = 200.0
    timeout: float = 30.0

    def __post_init__(self) -> None:
        wrong = [
            f"--{name.replace('_', '-')} must be above 0; got {v}." for name, v in asdict(self).items() if not v > 0
        ]
        if wrong:
            raise ConfigError(wrong)


class Refusal(HTTPException):
    """A request that is refused, with what to do instead."""

    def __init__(self, status: int, what: str, advice: str, *, close: bool = False) -> None:
        super().__init__(status, {"error": what, "advice": advice}, {"Connection": "close"} if close else None)


def application(model: Deployment, limits: Limits, token: str | None) -> FastAPI:
    """Creates the server's application; it does not close the deployment."""
    batches, counts = Batches(model), Counts()
    decoding = ThreadPoolExecutor(usable_cores(), "decode")
    in_work = 0

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        work = asyncio.create_task(batches.work())
        yield
        work.cancel()
        with suppress(asyncio.CancelledError):
            await work
        decoding.shutdown(cancel_futures=True)
        batches.thread.shutdown(cancel_futures=True)

    app = FastAPI(title="ratp", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(_Gate, counts=counts, rate=_Rate(limits.rate))
    app.add_exception_handler(HTTPException, _as_json)
    app.add_exception_handler(404, _as_json)
    app.add_exception_handler(405, _as_json)
    app.add_exception_handler(RequestValidationError, _as_json)
    app.add_exception_handler(RatpError, _as_json)
    app.add_exception_handler(Exception, _as_json)

    async def answer(request: Request, name: str | None) -> dict[str, Any]:
        nonlocal in_work
        if in_work >= IN_WORK:
            raise Refusal(503, f"{IN_WORK} images are in work already", "Try again in a second.", close=True)
        started, in_work = time.perf_counter(), in_work + 1
        try:
            data = await _body(request, limits)
            image = await asyncio.get_running_loop().run_in_executor(decoding, _decode, data, model, limits.max_pixels)
            found = await batches.ask(image, name)
        finally:
            in_work -= 1
        counts.images += 1
        counts.seconds += time.perf_counter() - started
        return {
            "class": found.label,
            "confidence": round(found.confidence, 6),
            "version": found.version,
            "level": found.level,
        }

    def authorise(request: Request) -> None:
        if token is None:
            raise Refusal(403, "this is switched off", "Start the server with --token or $RATP_TOKEN.")
        given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
        if not hmac.compare_digest(given, token.encode()):
            raise Refusal(401, "the token is missing or wrong", "Send the header Authorization: Bearer TOKEN.")

    @app.post("/predict")
    async def predict(request: Request) -> dict[str, Any]:
        """Classifies the image in the body."""
        return await answer(request, None)

    @app.post("/observe")
    async def observe(request: Request, name: str = "") -> dict[str, Any]:
        """Classifies the image in the body, and lets the alarm count it, under an optional name."""
        return await answer(request, printable(name)[:200] or f"image {counts.images + 1}")

    @app.post("/rollback")
    async def rollback(request: Request, version: int | None = None) -> dict[str, Any]:
        """Lets an earlier version answer again."""
        authorise(request)
        chosen = await asyncio.get_running_loop().run_in_executor(batches.thread, model.rollback, version)
        return asdict(chosen)

    @app.post("/adapt", status_code=202)
    async def adapt(request: Request) -> dict[str, Any]:
        """Starts a stage on the images observed since the alarm rose."""
        authorise(request)
        images = model.waiting
        await asyncio.get_running_loop().run_in_executor(batches.thread, lambda: model.adapt(background=True))
        return {"adapting": True, "images": images}

    @app.get("/healthz")
    async def healthz() -> dict[str, Any]:
        """Says that the server answers."""
        return {"status": "ok", "version": model.version, "level": model.level, "problem": batches.problem}

    @app.get("/versions")
    async def versions() -> dict[str, Any]:
        """Lists the versions."""
        state = {"current": model.version, "level": model.level, "adapting": model.adapting, "waiting": model.waiting}
        return {**state, "versions": [asdict(version) for version in model.history()]}

    @app.get("/metrics", response_class=PlainTextResponse)
    def numbers() -> str:
        """Returns numbers for Prometheus."""
        return metrics(model, counts)

    @app.get("/", response_class=HTMLResponse)
    def page() -> str:
        """Shows the deployment."""
        return html_page(model, counts, batches.problem)

    return app


def serve(
    model: Deployment,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    limits: Limits | None = None,
    token: str | None = None,
    ready: Callable[[str], None] = lambda address: None,
) -> None:
    """Serves a deployment until a signal stops it; ``ready`` is called with the address."""
    app = application(model, limits or Limits(), token)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=CONNECTIONS)
    except (OSError, OverflowError) as error:
        why = str(getattr(error, "strerror", None) or error).partition(" (while")[0]
        raise RatpError(
            f"cannot listen at {host}, port {port}: {why}. Choose another with --host and --port."
        ) from error
    with listener:
        number = listener.getsockname()[1]
        ready(f"http://[{host}]:{number}" if family == socket.AF_INET6 else f"http://{host}:{number}")
        server_for(app).run(sockets=[listener])


def server_for(app: FastAPI) -> uvicorn.Server:
    """Creates the server of an application."""
    config = uvicorn.Config(
        app,
        http=_PunctualProtocol,
        loop="asyncio",
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,  # else a client could choose the address that --rate counts
        limit_concurrency=CONNECTIONS,
        timeout_graceful_shutdown=10,
    )
    return uvicorn.Server(config)


async def _body(request: Request, limits: Limits) -> bytes:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if not (kind.startswith("image/") or kind == "application/octet-stream"):
        advice = "Send the bytes of one image as the body, with Content-Type: image/jpeg, image/png, …"
        raise Refusal(415, f"the body is {kind or 'of no type'}", advice, close=True)
    too_large = Refusal(
        413,
        f"the image has more than {limits.max_bytes:,} bytes",
        "Send a smaller one, or raise --max-bytes.",
        close=True,
    )
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared[:20]) > limits.max_bytes:
        raise too_large
    data = bytearray()
    try:
        async with asyncio.timeout(limits.timeout):
            async for part in request.stream():
                data += part
                if len(data) > limits.max_bytes:
                    raise too_large
    except TimeoutError as error:
        what = f"the image did not arrive within {limits.timeout:g} s"
        raise Refusal(408, what, "Send it faster, or raise --timeout.", close=True) from error
    except ClientDisconnect as error:
        raise Refusal(400, "the connection broke off", "Send the image again.", close=True) from error
    return bytes(data)


def _decode(data: bytes, model: Deployment, max_pixels: int) -> Tensor:
    try:
        return decode_image(data, model.image_size, max_pixels)
    except BadImage as error:
        raise Refusal(400, f"no usable image: {error}", "Send a complete image file.") from error
    except MemoryError as error:
        raise Refusal(503, "too little memory for this image", "Send a smaller one, or try again later.") from error


async def _as_json(_: Request, error: Exception) -> JSONResponse:
    """Describes an error as JSON: what is wrong and what to do."""
    status, headers = 500, None
    what, advice = "the server failed", "See what the server has printed, and try again."
    if isinstance(error, RequestValidationError):
        status, what = 422, "; ".join(f"{item['loc'][-1]}: {item['msg']}" for item in error.errors())
        advice = "Correct the value."
    elif isinstance(error, AnswerError):
        what, advice = str(error), "POST /rollback, or ratp versions DEPLOYMENT --rollback N."
    elif isinstance(error, RatpError):
        status, what, advice = 409, str(error), "See /versions."
    elif status_code := getattr(error, "status_code", None):
        status, headers, detail = int(status_code), getattr(error, "headers", None), getattr(error, "detail", "")
        known = {404: "there is no such page", 405: "this page takes another method"}
        what, advice = (
            known.get(status, str(detail)),
            f"Pages: GET {' '.join(_PATHS[:4])}, POST {' '.join(_PATHS[4:])}.",
        )
        if isinstance(detail, dict):
            what, advice = detail["error"], detail["advice"]
    return JSONResponse({"error": what, "advice": advice}, status, headers)


class _Rate:
    """Limits the requests of each client, with a bucket of tokens per address."""

    def __init__(self, rate: float) -> None:
        self._rate, self._most = rate, max(rate, 1.0)
        self._buckets: dict[str, tuple[float, float]] = {}

    def allows(self, client: str) -> bool:
        """Takes a token of the client's, if there is one."""
        now = time.monotonic()
        tokens, before = self._buckets.pop(client, (self._most, now))
        tokens = min(self._most, tokens + (now - before) * self._rate)
        self._buckets[client] = (max(tokens - 1, 0.0) if tokens >= 1 else tokens), now
        if len(self._buckets) > _CLIENTS:
            self._buckets.pop(next(iter(self._buckets)))  # the one that has asked for nothing for longest
        return tokens >= 1


class _Gate:
    """Refuses clients that ask too often, and counts requests."""

    def __init__(self, app: ASGIApp, counts: Counts, rate: _Rate) -> None:
        self._app, self._counts, self._rate = app, counts, rate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in _PATHS else "other"

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._counts.add(path, message["status"])
                message["headers"] = [*message["headers"], *((k.encode(), v.encode()) for k, v in _SAFE.items())]
            await send(message)

        client = scope["client"][0] if scope.get("client") else ""
        if path != "/healthz" and not self._rate.allows(client):
            body = {"error": "too many requests", "advice": "Wait a second; --rate sets the limit."}
            await JSONResponse(body, 429, {"Retry-After": "1", "Connection": "close"})(scope, receive, counted)
            return
        await self._app(scope, receive, counted)


class _PunctualProtocol(H11Protocol):
    """HTTP that closes connections on which the head of a request does not arrive in time."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the time for the first request."""
        super().connection_made(transport)
        self._start_timer()

    def on_response_complete(self) -> None:
        """Starts the time for the next request."""
        super().on_response_complete()
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the time."""
        self._stop_timer()
        super().connection_lost(exc)

    def _start_timer(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(HEAD_SECONDS, self._close_idle)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _close_idle(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
