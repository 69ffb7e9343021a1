"""Batch files: OpenAI's JSONL of requests, answered by the server's own routes in this process.

Lines are ``{"custom_id", "method", "url", "body"}``; answers ``{"id", "custom_id", "response", "error"}``, in the order
in which they are ready. A file of answers that exists is gone on with: what has been answered stays.
"""

from __future__ import annotations

import asyncio
import json
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from qiao.config import EngineArgs
from qiao.errors import UsageError
from qiao.server.args import ServerArgs
from qiao.transport.process import HostOptions

if TYPE_CHECKING:
    import httpx

URLS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
    *("/v1/embeddings", "/v1/score", "/v1/rerank"),
)
"""What a line may ask."""

RETRIES = 20
"""Most times that a request is sent again because the queue is full or the engine starts again."""


class Line(msgspec.Struct):
    """One request of a batch file."""

    custom_id: str
    url: str
    body: dict[str, Any]
    method: str = "POST"


def read_requests(path: Path) -> list[Line]:
    """All lines of ``path``, checked before any of them costs time. Raises ``UsageError`` naming line and field."""
    lines: list[Line] = []
    seen: dict[str, int] = {}
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                if raw.strip():
                    line = _line(raw, f"{path}, line {number}")
                    if (earlier := seen.setdefault(line.custom_id, number)) != number:
                        raise UsageError(
                            f"{path}, line {number}: custom_id {line.custom_id!r} is that of line {earlier}"
                        )
                    lines.append(line)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; give a readable JSONL file") from None
    if not lines:
        raise UsageError(f"{path}: holds no request")
    return lines


def _line(raw: bytes, where: str) -> Line:
    try:
        line = msgspec.json.decode(raw, type=Line)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise UsageError(f"{where}: {error}") from None
    if line.method != "POST":
        raise UsageError(f"{where}: method must be POST, got {line.method!r}")
    if line.url not in URLS:
        raise UsageError(f"{where}: url must be one of {', '.join(URLS)}, got {line.url!r}")
    if line.body.get("stream"):
        raise UsageError(f"{where}: body.stream cannot be true in a batch")
    return line


def answered(path: Path, requests: Sequence[Line]) -> dict[str, Mapping[str, Any]]:
    """The good answers that ``path`` holds already, by ``custom_id``; a line that a kill cut short is left out.

    Raises ``UsageError`` where they are those of another batch.
    """
    if not path.exists():
        return {}
    known = {line.custom_id for line in requests}
    found: dict[str, Mapping[str, Any]] = {}
    for raw in path.read_bytes().split(b"\n"):
        try:
            answer = json.loads(raw)
            name, status = answer["custom_id"], answer["response"]["status_code"]
        except (ValueError, TypeError, KeyError):
            continue
        if name not in known:
            raise UsageError(f"{path}: holds the answer to {name!r}, which is not in this batch; choose another file")
        if status == 200:
            found[name] = answer
    return found


def rewrite(path: Path, answers: Mapping[str, Mapping[str, Any]]) -> None:
    """Leave exactly ``answers`` in ``path``, at one stroke."""
    beside = path.with_name(path.name + ".part")
    with beside.open("wb") as file:
        for answer in answers.values():
            file.write(_encoded(answer))
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def _encoded(answer: Mapping[str, Any]) -> bytes:
    return json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def server_args(**answers: Any) -> ServerArgs:
    """The server of a batch: ``answers`` says how they are read. Nothing is kept but the file of answers."""
    return ServerArgs(disable_access_log=True, responses_db="off", **answers)


async def run_batch(
    args: EngineArgs, server: ServerArgs, requests: Sequence[Line], output: Path, advance: Callable[[bool], None]
) -> None:
    """Answer ``requests`` and append the answers to ``output``; ``advance(good)`` is called after each.

    Raises a ``QiaoError`` where the engine cannot start.
    """
    import httpx

    from qiao.server.app import create_app
    from qiao.server.loader import Loader, make_fleet
    from qiao.server.setup import Setup

    setup = Setup.single(args, server)
    loader = Loader(HostOptions(log_level="warning"))
    fleet = make_fleet(setup, loader.load)
    try:
        await fleet.start(setup.models[0])
        info = next(iter(fleet)).client.info
        app = create_app(fleet)
        transport = httpx.ASGITransport(app=app)
        patience = httpx.Timeout(None)  # an answer waits for its turn, however long the batch
        async with httpx.AsyncClient(transport=transport, base_url="http://batch", timeout=patience) as http:
            await _all(http, requests, output, advance, min(args.max_num_queued_reqs, 2 * info.max_num_seqs))
    finally:
        await fleet.close()


async def _all(
    http: httpx.AsyncClient, requests: Sequence[Line], output: Path, advance: Callable[[bool], None], width: int
) -> None:
    """``width`` requests at a time, so that memory is bounded however long the batch."""
    waiting = iter(requests)
    with output.open("ab", buffering=0) as file:

        async def work() -> None:
            for line in waiting:
                answer = await _one(http, line)
                file.write(_encoded(answer))
                advance(answer["response"]["status_code"] == 200)

        workers = [asyncio.create_task(work()) for _ in range(min(width, len(requests)))]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)


async def _one(http: httpx.AsyncClient, line: Line) -> dict[str, Any]:
    for attempt in range(RETRIES + 1):
        response = await http.post(line.url, json=line.body)
        if response.status_code != 503 or attempt == RETRIES:
            break
        await asyncio.sleep(float(response.headers.get("Retry-After", 1)))
    body = response.json()
    good = response.status_code == 200
    return {
        "id": f"batch-{uuid.uuid4().hex}",
        "custom_id": line.custom_id,
        "response": {
            "status_code": response.status_code,
            "request_id": str(body.get("id") or f"req-{uuid.uuid4().hex}"),
            "body": body,
        },
        "error": None if good else body.get("error"),
    }
