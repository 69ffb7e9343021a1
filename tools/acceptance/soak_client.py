"""The clients of ``soak.py``: known prompts, random behaviour, every answer compared."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

_STORY = "The bridge was built of stone, and every morning the old keeper walked over it, counting the boats. "
PROMPTS = (
    "Once upon a time",
    "The capital of France is",
    "def fibonacci(n):",
    _STORY + "One day a boat came that",
    _STORY + "When winter came, the river",
    _STORY * 3 + "In the end",
    "1, 2, 3, 4,",
    "Water boils at",
    "To make tea, first",
    "桥的那一边是",
    "Dear Sir or Madam,",
    "The three primary colours are",
)
"""Some share long beginnings, so that prefix hits, shared blocks and partial blocks all occur."""

LENGTHS = (1, 8, 17, 32, 48)
ACTIONS = ("whole", "stream", "several", "cancel_stream", "cancel_whole")
WEIGHTS = (3, 4, 1, 4, 2)


@dataclass
class Tally:
    """What happened so far. ``wrong`` holds the first faulty answers, ``errors`` the first unexpected failures."""

    done: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    tokens: int = 0


class Load:
    """Clients of one server. ``expected`` maps (prompt, max_tokens) to the answer that a request has alone."""

    def __init__(self, url: str, model: str, seed: int) -> None:
        self.url = url
        self.model = model
        self.tally = Tally()
        self.expected: dict[tuple[str, int], str] = {}
        self._random = random.Random(seed)

    def body(self, prompt: str, length: int, **more: Any) -> dict[str, Any]:
        """A greedy request that runs to its length."""
        return {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": length,
            "temperature": 0,
            "ignore_eos": True,
            **more,
        }

    async def learn(self, client: httpx.AsyncClient) -> None:
        """Ask each prompt alone, at each length.

        The text of a shorter answer cannot be cut from a longer one: a character may take several tokens.
        """
        for prompt in PROMPTS:
            for length in LENGTHS:
                self.expected[prompt, length] = await self.whole(client, prompt, length)

    async def whole(self, client: httpx.AsyncClient, prompt: str, length: int) -> str:
        """The text of one answer."""
        answer = await client.post("/v1/completions", json=self.body(prompt, length))
        answer.raise_for_status()
        text: str = answer.json()["choices"][0]["text"]
        return text

    async def run(self, clients: int, until: float) -> None:
        """``clients`` at once until the clock ``until`` (``time.monotonic()``)."""
        limits = httpx.Limits(max_connections=4 * clients, max_keepalive_connections=clients)
        async with httpx.AsyncClient(base_url=self.url, timeout=300, limits=limits) as client:
            seeds = [self._random.randrange(2**32) for _ in range(clients)]
            await asyncio.gather(*(self._one(client, seed, until) for seed in seeds))

    async def _one(self, client: httpx.AsyncClient, seed: int, until: float) -> None:
        dice = random.Random(seed)
        while time.monotonic() < until:
            action = dice.choices(ACTIONS, WEIGHTS)[0]
            prompt, length = dice.choice(PROMPTS), dice.choice(LENGTHS)
            try:
                await getattr(self, f"_{action}")(client, dice, prompt, length)
                self.tally.done[action] += 1
            except Exception as error:  # any failure is a finding, none may end the run
                self.tally.done["error"] += 1
                if len(self.tally.errors) < 20:
                    self.tally.errors.append(f"{action}: {type(error).__name__}: {error}")
                await asyncio.sleep(0.2)

    async def _whole(self, client: httpx.AsyncClient, dice: random.Random, prompt: str, length: int) -> None:
        self._check(prompt, length, await self.whole(client, prompt, length))

    async def _stream(self, client: httpx.AsyncClient, dice: random.Random, prompt: str, length: int) -> None:
        self._check(prompt, length, await self.stream(client, prompt, length))

    async def _several(self, client: httpx.AsyncClient, dice: random.Random, prompt: str, length: int) -> None:
        answer = await client.post("/v1/completions", json=self.body(prompt, length, n=3))
        answer.raise_for_status()
        for choice in answer.json()["choices"]:
            self._check(prompt, length, choice["text"])

    async def _cancel_stream(self, client: httpx.AsyncClient, dice: random.Random, prompt: str, length: int) -> None:
        """Leave after a few chunks; what came must be a beginning of the right answer."""
        text = await self.stream(client, prompt, length, leave_after=dice.randrange(6))
        if not self.expected[prompt, length].startswith(text):
            self._fault(prompt, length, text)

    async def _cancel_whole(self, client: httpx.AsyncClient, dice: random.Random, prompt: str, length: int) -> None:
        """Hang up before the answer."""
        asking = asyncio.create_task(self.whole(client, prompt, length))
        await asyncio.sleep(dice.random() * 0.3)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    async def stream(
        self,
        client: httpx.AsyncClient,
        prompt: str,
        length: int,
        leave_after: int | None = None,
        first: asyncio.Event | None = None,
    ) -> str:
        """The streamed text, or its beginning where the client leaves after ``leave_after`` chunks.

        ``first`` is set when the first chunk has come. Raises ``RuntimeError`` on an error event or an early end.
        """
        text, chunks, ended = "", 0, False
        async with client.stream("POST", "/v1/completions", json=self.body(prompt, length, stream=True)) as answer:
            if answer.status_code != 200:
                raise RuntimeError(f"status {answer.status_code}: {(await answer.aread())[:300]!r}")
            async for line in answer.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    ended = True
                    break
                if leave_after is not None and chunks >= leave_after:
                    return text
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(f"error event: {event['error']}")
                text += "".join(choice["text"] for choice in event["choices"])
                chunks += 1
                if first is not None:
                    first.set()
        if not ended and leave_after is None:
            raise RuntimeError("the stream ended without [DONE]")
        return text

    def _check(self, prompt: str, length: int, text: str) -> None:
        self.tally.tokens += length
        if text != self.expected[prompt, length]:
            self._fault(prompt, length, text)

    def _fault(self, prompt: str, length: int, text: str) -> None:
        self.tally.done["wrong"] += 1
        if len(self.tally.wrong) < 20:
            wanted = self.expected[prompt, length]
            self.tally.wrong.append(f"{prompt[-40:]!r} x {length}: {text!r}, alone {wanted!r}")
