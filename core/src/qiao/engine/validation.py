"""What the engine refuses before it queues a request."""

from __future__ import annotations

from qiao.engine.config import EngineConfig
from qiao.engine.pooling import POOLINGS
from qiao.engine.request import EngineRequest
from qiao.errors import ParameterError, PromptTooLongError


def check_request(request: EngineRequest, config: EngineConfig) -> None:
    """Refuse what could only fail later.

    Raises ``ParameterError`` naming the field, or ``PromptTooLongError`` with both numbers.
    """
    prompt, params = request.prompt_token_ids, request.params
    if not prompt:
        raise ParameterError("prompt", "must hold at least one token")
    if min(prompt) < 0 or max(prompt) >= config.vocab_size:
        worst = min(prompt) if min(prompt) < 0 else max(prompt)
        raise ParameterError("prompt", f"token id {worst} is outside the vocabulary of {config.vocab_size}")
    if request.pooling and (request.pooling not in POOLINGS or params.max_tokens != 0 or params.n != 1):
        raise ParameterError("pooling", f"must be one of {', '.join(POOLINGS)}, for one prompt without an answer")
    params.check_vocabulary(config.vocab_size, config.vocab_size)
    for word in params.bad_words_token_ids or ():
        if not word or min(word) < 0 or max(word) >= config.vocab_size:
            raise ParameterError("bad_words", f"token ids {word} are not all in the vocabulary of {config.vocab_size}")
    _check_choice(request, config.vocab_size)
    if params.n > config.max_num_seqs:
        raise ParameterError("n", f"at most {config.max_num_seqs} (--max-num-seqs), got {params.n}")
    _check_length(len(prompt), params.max_tokens, config)
    if request.kv_share is not None:
        _check_share(len(prompt), params.max_tokens, config.capped_blocks(request.kv_share), config)


def _check_choice(request: EngineRequest, vocab_size: int) -> None:
    """Refuse settings that leave not even a first token to choose from."""
    params = request.params
    if params.max_tokens == 0:
        return
    out = {w[0] for w in params.bad_words_token_ids or () if len(w) == 1}
    if params.min_tokens > 0:
        out |= set(params.stop_token_ids or ()) | (set() if params.ignore_eos else set(request.eos_token_ids))
    if params.allowed_token_ids is None and len(out) >= vocab_size:
        raise ParameterError(
            "stop_token_ids", "hold, with bad_words, every token, which min_tokens puts off; name fewer"
        )
    if params.allowed_token_ids is not None and out.issuperset(params.allowed_token_ids):
        raise ParameterError(
            "allowed_token_ids",
            "bad_words forbid, or min_tokens puts off, every token of them; allow another one or lower min_tokens",
        )


def _check_length(prompt: int, max_tokens: int | None, config: EngineConfig) -> None:
    room = 0 if max_tokens == 0 else 1
    if prompt + room > config.max_model_len:
        raise PromptTooLongError(
            f"the prompt has {prompt} tokens, and the context of {config.max_model_len} tokens must hold it and "
            f"{room} more; shorten the prompt or raise --max-model-len"
        )
    if prompt + room > config.capacity:
        raise PromptTooLongError(
            f"the prompt has {prompt} tokens, and the KV cache of {config.num_blocks} blocks of {config.block_size} "
            f"tokens holds {config.capacity}; shorten the prompt or give the cache more memory"
        )


def _check_share(prompt: int, max_tokens: int | None, blocks: int, config: EngineConfig) -> None:
    room = 0 if max_tokens == 0 else 1
    if prompt + room > blocks * config.block_size:
        raise PromptTooLongError(
            f"the prompt has {prompt} tokens, and this key's share of the KV cache holds {blocks * config.block_size}; "
            "shorten the prompt or ask for a larger share"
        )
