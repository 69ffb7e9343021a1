"""What an answer's text holds: reasoning, content and tool calls, told apart as the text comes.

One rule for all parsers: what they find does not depend on how the text is cut into pieces. So a stream's parts joined
are the parts of the whole answer.
"""

from qiao.answers.answer import AnswerParser, CallDelta, Parts
from qiao.answers.base import ArgumentsDelta, ToolCall, ToolParser
from qiao.answers.forced import NamedParser, RequiredParser, forced_constraint
from qiao.answers.reasoning import REASONING_PARSERS, ReasoningFormat, ReasoningSplitter
from qiao.answers.registry import TOOL_PARSERS

__all__ = [
    "REASONING_PARSERS",
    "TOOL_PARSERS",
    "AnswerParser",
    "ArgumentsDelta",
    "CallDelta",
    "NamedParser",
    "Parts",
    "ReasoningFormat",
    "ReasoningSplitter",
    "RequiredParser",
    "ToolCall",
    "ToolParser",
    "forced_constraint",
]
