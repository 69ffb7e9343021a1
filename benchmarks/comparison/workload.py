"""What is sent: cells of the comparison, prompts, answer lengths and arrival times, all from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

_TEXT = """
the of and to in is was for that on with as are at be this have from or had by but not what all were when we
there can an your which their if will each about how up out them then she many some so these would other into
has more her two like him see time could no make than first its who now people my made over did down only way
find use may water long little very after words called just where most know get through back before go good
new write our used me man too any day same right look think also around another come work three word must
because does part even place well such here take why help put years different away again off went old number
great men say small every found still between name should home big air line set own under read last never us
left end along while might next sound below something both those show large often house world going school
important until form food keep children land side without boy once life four head above kind almost live page
earth need far hand high year mother light country father let night being study second soon story since white
ever paper hard near sentence better best today try sun thing example change answer room sea top learn point
city play five usually money seen car given order red door ship half rock fire south problem piece king
"""
WORDS = tuple(_TEXT.split())
"""Each is one of the first 32,000 tokens of SmolLM2's vocabulary, at the start of a text and after a space."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One kind of load.

    ``prompt`` and ``output`` are ranges of tokens. With ``rate`` (requests a second) arrivals are Poisson; without it
    ``concurrency`` requests are kept running.
    """

    name: str
    title: str
    requests: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    concurrency: int = 1
    rate: float | None = None
    sizes: tuple[str, ...] = ("135m", "1b")

    @property
    def cuttable(self) -> bool:
        """Whether its figures (rate while all streams run, first tokens) are known once all have a first text."""
        return self.rate is not None or self.concurrency > 1


@dataclass(frozen=True, slots=True)
class Request:
    """One request: seconds after the start of the run, text, and the number of tokens wanted."""

    at: float
    prompt: str
    prompt_tokens: int
    output_tokens: int


_SHORT, _ANSWER = (64, 128), (20, 300)
CELLS = (
    Cell(name="single", title="single stream decode", requests=2, prompt=(128, 128), output=(128, 128)),
    Cell(name="prefill", title="prefill 1,024", requests=2, prompt=(1024, 1024), output=(1, 1)),
    Cell(name="streams8", title="8 streams", requests=24, prompt=_SHORT, output=_ANSWER, concurrency=8),
    Cell(
        name="streams24",
        title="24 streams",
        requests=48,
        prompt=_SHORT,
        output=_ANSWER,
        concurrency=24,
        sizes=("135m",),
    ),
    *(
        Cell(
            name=f"poisson-{rate}",
            title=f"Poisson {rate}/s",
            requests=max(8, round(rate * 15)),
            prompt=_SHORT,
            output=_ANSWER,
            rate=rate,
            sizes=("135m",),
        )
        for rate in (0.6, 1.2, 2.2)
    ),
)
"""The cells of the table, in the order in which they are measured (what decides a Poisson cell comes before it)."""

WARM_UP = Cell(name="warm-up", title="warm-up", requests=3, prompt=(64, 128), output=(8, 8), concurrency=2)


def requests_of(cell: Cell, size: str, seed: str) -> list[Request]:
    """The cell's requests for a model of ``size``: the same for each server, others with another ``seed``.

    Prompts share no beginning that a prefix cache could use. The larger model gets fewer requests: it takes longer.
    """
    rng = random.Random(f"{cell.name} {seed}")
    count = cell.requests if size == "135m" else cell.concurrency * 3 // 2
    made, now = [], 0.0
    for _ in range(count):
        if cell.rate is not None:
            now += rng.expovariate(cell.rate)
        words = rng.randint(*cell.prompt)
        made.append(Request(now, " ".join(rng.choices(WORDS, k=words)), words, rng.randint(*cell.output)))
    return made


def quick(cell: Cell) -> Cell:
    """The cell cut to about two requests, to see that everything runs; its figures mean nothing."""
    output = (min(cell.output[0], 8), min(cell.output[1], 16))
    return Cell(
        name=cell.name,
        title=cell.title,
        requests=2,
        prompt=cell.prompt,
        output=output,
        concurrency=min(cell.concurrency, 2),
        rate=cell.rate,
        sizes=cell.sizes,
    )
