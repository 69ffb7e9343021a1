"""Taking out of a text what must not be kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import regex

from qiao.errors import ParameterError

RULES: Mapping[str, str] = {
    "email": r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+",
    "phone": r"(?<![\w.])\+?\d(?:[ ()./-]?\d){7,14}(?![\w.])",
    "card": r"(?<!\d)\d(?:[ -]?\d){12,18}(?!\d)",
    "key": r"(?:\b(?:sk|pk|qk|ghp|gho|hf|xox[abp])[-_][\w-]{8,}|\bBearer +[\w.~+/-]{8,}=*)",
    "ip": r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.])",
}
"""Rules by name; anything else that is given is a pattern itself."""

MARK = "[redacted]"

SECONDS = 0.5
"""What one rule may take for one text; a pattern that runs away hides the whole text instead of letting it out."""


class Redaction:
    """Rules in order. Raises ``ParameterError`` for a pattern that cannot be read."""

    def __init__(self, rules: Sequence[str]) -> None:
        try:
            self._patterns = [regex.compile(RULES.get(rule, rule)) for rule in rules]
        except regex.error as error:
            raise ParameterError("audit_redact", f"is neither {', '.join(RULES)} nor a pattern: {error}") from None

    def apply(self, text: str) -> str:
        """``text`` with every match replaced by ``MARK``."""
        for pattern in self._patterns:
            try:
                text = pattern.sub(MARK, text, timeout=SECONDS, concurrent=True)  # other threads run beside it
            except TimeoutError:
                return MARK
        return text
