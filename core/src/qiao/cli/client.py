"""A small client of an OpenAI-compatible server, for the commands that talk to a running one."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from qiao.errors import NotFoundError, OverloadedError, QiaoError, UsageError

if TYPE_CHECKING:
    import httpx

DEFAULT_URL = "http://localhost:8000/v1"
DONE = "[DONE]"


def is_loopback(url: str) -> bool:
    """Whether ``url`` is on this machine, where a proxy from the environment would only be in the way."""
    return urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")


def error_from(status: int, body: str) -> QiaoError:
    """The exception for an HTTP ``status`` of 400 or more and its ``body`` (OpenAI's error object or anything else)."""
    try:
        error = json.loads(body)["error"]
        message = error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, TypeError):
        message = body.strip()[:500] or "no explanation"
    if status in (401, 403):
        return UsageError(f"the server refused the key ({message}); give the right one with --api-key")
    kind: type[QiaoError] = QiaoError
    if status == 404:
        kind = NotFoundError
    elif status in (429, 503):
        kind = OverloadedError
    elif status < 500:
        kind = UsageError
    return kind(f"the server answered {status}: {message}")


def sse_data(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream, up to ``[DONE]``.

    Raises ``QiaoError`` for an error object in the stream and for a stream that ends early.
    """
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == DONE:
            return
        event = json.loads(data)
        error = event.get("error")
        if error:
            code = error.get("code") if isinstance(error, dict) else None
            raise error_from(code if isinstance(code, int) else 500, data)
        yield event
    raise QiaoError("the server closed the stream before its end; its log says why")


def text_of(event: dict[str, Any]) -> str:
    """The new text of one streamed chunk of ``/completions`` or ``/chat/completions``, perhaps empty."""
    for choice in event.get("choices") or ():
        return choice.get("text") or (choice.get("delta") or {}).get("content") or ""
    return ""


@dataclass(slots=True)
class StreamStats:
    """What was measured while an answer streamed; seconds, and tokens as the server counted them."""

    seconds: float = 0.0
    first_text: float | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def line(self) -> str:
        """One line for a person."""
        first = "-" if self.first_text is None else f"{self.first_text * 1000:.0f} ms"
        decode = self.seconds - (self.first_text or 0.0)
        rate = f"{(self.completion_tokens - 1) / decode:.1f}" if self.completion_tokens > 1 and decode > 0 else "-"
        return (
            f"[{self.prompt_tokens} prompt tokens, {self.completion_tokens} generated in {self.seconds:.2f} s; "
            f"time to first token {first}, then {rate} tokens/s]"
        )


class Client:
    """Requests to the server at ``url`` (with or without ``/v1``); use as a context manager."""

    def __init__(self, url: str = DEFAULT_URL, api_key: str | None = None) -> None:
        import httpx

        base = url.rstrip("/")
        if not base.startswith(("http://", "https://")):
            raise UsageError(f"--url must start with http:// or https://, got {url!r}")
        self.url = base if base.endswith("/v1") else base + "/v1"
        key = api_key or os.environ.get("OPENAI_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(10.0, read=None)  # an answer may wait in the queue for long
        self._http = httpx.Client(headers=headers, timeout=timeout, trust_env=not is_loopback(self.url))

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def model(self, wanted: str | None = None) -> str:
        """``wanted``, or the first model that the server lists."""
        if wanted:
            return wanted
        response = self._send("GET", "/models")
        models = response.json().get("data") or []
        if not models:
            raise NotFoundError(f"the server at {self.url} lists no model; name one with --model-name")
        return str(models[0]["id"])

    def stream(self, path: str, body: dict[str, Any], stats: StreamStats) -> Iterator[str]:
        """Post ``body`` to ``path`` and yield text as it arrives; ``stats`` is filled on the way."""
        import httpx

        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        start = time.perf_counter()
        try:
            with self._http.stream("POST", self.url + path, json=body) as response:
                if response.status_code >= 400:
                    raise error_from(response.status_code, response.read().decode(errors="replace"))
                for event in sse_data(response.iter_lines()):
                    self._note_usage(event, stats)
                    text = text_of(event)
                    if text and stats.first_text is None:
                        stats.first_text = time.perf_counter() - start
                    if text:
                        yield text
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        finally:
            stats.seconds = time.perf_counter() - start

    @staticmethod
    def _note_usage(event: dict[str, Any], stats: StreamStats) -> None:
        usage = event.get("usage")
        if usage:
            stats.prompt_tokens = usage.get("prompt_tokens") or 0
            stats.completion_tokens = usage.get("completion_tokens") or 0

    def _send(self, method: str, path: str) -> httpx.Response:
        import httpx

        try:
            response = self._http.request(method, self.url + path)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if response.status_code >= 400:
            raise error_from(response.status_code, response.text)
        return response

    def _unreachable(self, error: Exception) -> UsageError:
        return UsageError(
            f"no answer from {self.url} ({error}); start a server with `qiao serve MODEL`, or name another with --url"
        )
