"""The offline API, as vLLM's users write it: ``LLM(model=...).generate(prompts, SamplingParams(...))``."""

from qiao.llm.arguments import engine_args
from qiao.llm.llm import LLM
from qiao.llm.prompts import TextPrompt, TokensPrompt

__all__ = ["LLM", "TextPrompt", "TokensPrompt", "engine_args"]
