"""Calibration data: a JSON Lines file, one sample a line."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qiao.errors import ParameterError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FLAG = "--calibration"


def read_samples(
    file: Path, tokenizer: PreTrainedTokenizerBase, samples: int, length: int, seed: int
) -> list[list[int]]:
    """``samples`` token sequences of at most ``length`` tokens, drawn from ``file`` with ``seed``, in the file's order.

    A line is ``{"text": "..."}`` or ``{"messages": [...]}``, which goes through the model's chat template. All lines
    are taken where there are not more. Raises ``ParameterError`` naming the line.
    """
    records = list(_records(file))
    chosen = list(range(len(records)))
    if len(records) > samples:
        chosen = sorted(random.Random(seed).sample(chosen, samples))  # noqa: S311 - not for secrets
    found = []
    for i in chosen:
        ids = _tokens(file, *records[i], tokenizer)[:length]
        if len(ids) > 1:
            found.append(ids)
    if not found:
        raise ParameterError(_FLAG, f"{file} holds no sample of at least two tokens")
    return found


def digest(sequences: Sequence[Sequence[int]]) -> str:
    """A hash over all tokens."""
    return hashlib.sha256(json.dumps([list(ids) for ids in sequences]).encode()).hexdigest()


def _records(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(_FLAG, f"{file} cannot be read ({error}); give a JSON Lines file in UTF-8") from error
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ParameterError(_FLAG, f"{file}, line {number}: is not JSON ({error})") from error
        if not isinstance(record, dict) or not ("text" in record or "messages" in record):
            raise ParameterError(_FLAG, f'{file}, line {number}: must be {{"text": "..."}} or {{"messages": [...]}}')
        yield number, record


def _tokens(file: Path, number: int, record: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if "text" in record:
        if not isinstance(record["text"], str):
            raise ParameterError(_FLAG, f"{file}, line {number}: text must be a string")
        return list(tokenizer(record["text"])["input_ids"])
    try:
        text = tokenizer.apply_chat_template(record["messages"], tokenize=False)
    except Exception as error:  # templates are programs, and raise what they like
        raise ParameterError(
            _FLAG, f"{file}, line {number}: the chat template refused the messages ({error}); give text instead"
        ) from error
    return list(tokenizer(str(text), add_special_tokens=False)["input_ids"])
