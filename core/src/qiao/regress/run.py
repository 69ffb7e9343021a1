"""Two models on one suite, one after the other."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch

from qiao.config import EngineArgs
from qiao.errors import ModelError
from qiao.regress.divergence import Divergence
from qiao.regress.models import Answer, Facts, Notes, Side, loaded, naming
from qiao.regress.results import Alternative, CaseResult, Split, first_difference
from qiao.regress.store import LogitStore
from qiao.regress.suite import Case, Suite

_TOGETHER = 32
"""Answers computed together."""

_SHOWN = 5
"""Likeliest tokens of each model where answers part."""

Advance = Callable[[str, int, int], None]
"""Told the stage's key, how many of its cases are done, and how many there are."""


def _silent(stage: str, done: int, total: int) -> None:
    return None


@dataclass(frozen=True, kw_only=True)
class Options:
    """``text_only`` compares answers alone, for models of different vocabularies. ``scratch`` is the folder for the
    base's logits (the system's own if None).
    """

    text_only: bool = False
    scratch: Path | None = None
    advance: Advance = _silent


@dataclass(frozen=True)
class Comparison:
    """Everything that was found, before it is judged."""

    suite: Suite
    base: Facts
    candidate: Facts
    results: list[CaseResult]
    notes: list[tuple[str, dict[str, str]]]
    text_only: bool


@dataclass
class _BaseCase:
    """A case with the base's part of the work; ``stored`` is where its logits start in the store."""

    case: Case
    prompt: list[int]
    reference: list[int]
    answer: Answer
    limit: int
    stored: int = 0


@dataclass
class _BaseRun:
    facts: Facts
    cases: list[_BaseCase]
    vocabulary: list[bytes] = field(default_factory=list)
    chat: bool = True


def compare(base: EngineArgs, candidate: EngineArgs, suite: Suite, options: Options | None = None) -> Comparison:
    """Run ``suite`` on ``base``, then on ``candidate``; at no time are both in memory.

    Both are asked greedily. Distributions are compared along the base's answer and along the references, each
    sequence computed alone. Raises ``UsageError`` and ``PluginError`` as ``build_engine``, naming the model and the
    case; ``ModelError`` where the vocabularies differ.
    """
    options = options or Options()
    notes = Notes()
    with tempfile.TemporaryDirectory(prefix="qiao-regress-", dir=options.scratch) as folder:
        with naming(f"base {base.model}"):
            first, store = _base(base, suite, Path(folder), options)
        if not first.chat and any(case.messages for case in suite.cases):
            notes.add("no_chat_template")
        with naming(f"candidate {candidate.model}"):
            facts, results = _candidate(candidate, first, store, options, notes)
    return Comparison(suite, first.facts, facts, results, notes.found, options.text_only)


def _base(args: EngineArgs, suite: Suite, folder: Path, options: Options) -> tuple[_BaseRun, LogitStore]:
    """The base's part; on return the model is gone, which it is not while a name of the caller refers to it."""
    options.advance("load_base", 0, 1)
    with loaded(args) as side:
        options.advance("load_base", 1, 1)
        store = LogitStore(folder, side.vocab_size)
        return _run_base(side, suite, store, options), store


def _candidate(
    args: EngineArgs, first: _BaseRun, store: LogitStore, options: Options, notes: Notes
) -> tuple[Facts, list[CaseResult]]:
    options.advance("load_candidate", 0, 1)
    with loaded(args) as side:
        options.advance("load_candidate", 1, 1)
        return side.facts(), _run_candidate(side, first, store, options, notes)


def _run_base(side: Side, suite: Suite, store: LogitStore, options: Options) -> _BaseRun:
    run = _BaseRun(side.facts(), [], [] if options.text_only else side.vocabulary(), side.has_chat_template)
    prompts = []
    for case in suite.cases:
        with naming(f"case {case.id}"):
            prompts.append(side.prompt_ids(case))
    limits = [suite.max_tokens(case) for case in suite.cases]
    answers = _answers(side, prompts, limits, "answer_base", options)
    for case, prompt, answer, limit in zip(suite.cases, prompts, answers, limits, strict=True):
        reference = side.text_ids(case.reference) if case.reference else []
        run.cases.append(_BaseCase(case, prompt, reference, answer, limit))
    if options.text_only:
        return run
    store.reserve(sum(len(item.answer.token_ids) + len(item.reference) for item in run.cases))
    for done, item in enumerate(run.cases, 1):
        item.stored = len(store)
        with naming(f"case {item.case.id}"):
            for continuation in (item.answer.token_ids, item.reference):
                for rows in side.logits(item.prompt, continuation) if continuation else ():
                    store.append(rows)
        options.advance("score_base", done, len(run.cases))
    return run


def _answers(side: Side, prompts: list[list[int]], limits: list[int], stage: str, options: Options) -> Iterator[Answer]:
    for start in range(0, len(prompts), _TOGETHER):
        end = min(start + _TOGETHER, len(prompts))
        yield from side.answers(prompts[start:end], limits[start:end])
        options.advance(stage, end, len(prompts))


def _run_candidate(side: Side, first: _BaseRun, store: LogitStore, options: Options, notes: Notes) -> list[CaseResult]:
    own = [side.prompt_ids(item.case) for item in first.cases]
    prompts = own if options.text_only else [item.prompt for item in first.cases]
    if not options.text_only:
        _check_vocabulary(side, first, notes)
        differing = sum(mine != item.prompt for mine, item in zip(own, first.cases, strict=True))
        if differing:
            notes.add("prompts_differ", count=differing)
    answers = list(_answers(side, prompts, [item.limit for item in first.cases], "answer_candidate", options))
    results = []
    for done, (item, answer) in enumerate(zip(first.cases, answers, strict=True), 1):
        with naming(f"case {item.case.id}"):
            results.append(_result(side, item, answer, store, options))
        options.advance("score_candidate", done, len(first.cases))
    return results


def _check_vocabulary(side: Side, first: _BaseRun, notes: Notes) -> None:
    """Refuse two models whose token ids mean different texts; a longer table with unused ids is let pass."""
    theirs = side.vocabulary()
    for i, (one, other) in enumerate(zip(first.vocabulary, theirs, strict=False)):
        if one != other:
            raise ModelError(
                f"its vocabulary is not the base's: token {i} is {one!r} there and {other!r} here, so distributions "
                "cannot be compared. With --text-only answers and checks are compared alone."
            )
    if len(theirs) != len(first.vocabulary):
        notes.add("vocabulary_cut", base=len(first.vocabulary), candidate=len(theirs))


def _result(side: Side, item: _BaseCase, answer: Answer, store: LogitStore, options: Options) -> CaseResult:
    count = len(item.answer.token_ids)
    if options.text_only:
        none = Divergence.joined([])
        return CaseResult(item.case, item.answer, answer, none, none, None)
    at = first_difference(item.answer.token_ids, answer.token_ids)
    parting = _Parting(at)
    along = _divergence(side, item.prompt, item.answer.token_ids, store, item.stored, parting)
    reference = _divergence(side, item.prompt, item.reference, store, item.stored + count)
    split = None if at is None else _split(side, at, parting, item.answer.token_ids, answer.token_ids)
    return CaseResult(item.case, item.answer, answer, along, reference, split)


@dataclass
class _Parting:
    """Keeps both models' logits [V] of one position while the others stream by."""

    position: int | None
    base: torch.Tensor | None = None
    candidate: torch.Tensor | None = None

    def look(self, at: int, base: torch.Tensor, candidate: torch.Tensor) -> None:
        """Rows [n, V] of the positions from ``at`` on."""
        if self.position is not None and at <= self.position < at + len(base):
            self.base, self.candidate = base[self.position - at].clone(), candidate[self.position - at].clone()


def _divergence(
    side: Side,
    prompt: list[int],
    continuation: list[int],
    store: LogitStore,
    start: int,
    parting: _Parting | None = None,
) -> Divergence:
    """Along ``continuation``, against the base's rows from ``start`` on; both cut to the ids that both have."""
    parts: list[Divergence] = []
    at = 0
    for rows in side.logits(prompt, continuation) if continuation else ():
        base = store.read(start + at, len(rows))
        width = min(base.shape[1], rows.shape[1])
        base, rows = base[:, :width], rows[:, :width].float()
        if max(continuation) >= width:
            raise ModelError(f"token {max(continuation)} of the base's text is outside the {width} ids that both have")
        targets = torch.tensor(continuation[at : at + len(rows)])
        parts.append(Divergence.between(base, rows, targets))
        if parting is not None:
            parting.look(at, base, rows)
        at += len(rows)
    return Divergence.joined(parts)


def _split(side: Side, at: int, parting: _Parting, base_ids: list[int], ids: list[int]) -> Split:
    if parting.base is None or parting.candidate is None or at >= len(ids) or ids[at] >= len(parting.base):
        return Split(at)
    p, q = parting.base.double().log_softmax(-1), parting.candidate.double().log_softmax(-1)
    mine, other = base_ids[at], ids[at]
    best = [*p.topk(_SHOWN).indices.tolist(), *q.topk(_SHOWN).indices.tolist()]
    shown = list(islice(dict.fromkeys([mine, other, *best]), 2 * _SHOWN))
    labels = side.labels(shown)
    rows = (Alternative(label, float(p[i].exp()), float(q[i].exp())) for label, i in zip(labels, shown, strict=True))
    return Split(
        at,
        float(p[mine] - p[other]),
        float(q[other] - q[mine]),
        tuple(sorted(rows, key=lambda row: -row.base)),
    )
