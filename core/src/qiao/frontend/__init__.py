"""The text side of a model: prompts to tokens, tokens to text, and every check that needs no weights."""

from qiao.frontend.chat import ChatRenderer
from qiao.frontend.detokenizer import Detokenizer, make_detokenizer
from qiao.frontend.frontend import Frontend, TextFiles, check_text
from qiao.frontend.output import OutputDelta, OutputProcessor, Usage
from qiao.frontend.stops import StopChecker
from qiao.frontend.vocabulary import TokenTable

__all__ = [
    "ChatRenderer",
    "Detokenizer",
    "Frontend",
    "OutputDelta",
    "OutputProcessor",
    "StopChecker",
    "TextFiles",
    "TokenTable",
    "Usage",
    "check_text",
    "make_detokenizer",
]
