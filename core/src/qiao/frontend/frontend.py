"""From what a user asks to what the engine takes: tokens, limits and checks, all before the engine sees it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from qiao.config import EngineArgs
from qiao.engine.request import EngineInfo, EngineRequest
from qiao.errors import ModelError, ParameterError, PromptTooLongError
from qiao.frontend.chat import ChatRenderer
from qiao.frontend.grammar import GrammarChecker
from qiao.frontend.output import OutputProcessor
from qiao.frontend.vocabulary import TokenTable
from qiao.loading import (
    Pooling,
    eos_token_ids,
    load_generation_config,
    load_text_tokenizer,
    read_pooling,
    resolve,
    sampling_defaults,
)
from qiao.sampling_params import SamplingParams
from qiao.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from qiao.loading.text_tokenizer import AnyTokenizer

MAX_CACHE_SALT = 1024


@dataclass(frozen=True)
class TextFiles:
    """What a front end reads of a model's files; needs no engine and no torch, so it can be read while one starts.

    What it needs of the config comes with ``EngineInfo``.
    """

    tokenizer: AnyTokenizer
    generation_config: Mapping[str, Any]
    ends: tuple[Any, Any]
    """``eos_token_id`` of generation config and tokenizer."""
    pooling: Pooling = field(default_factory=Pooling)

    @classmethod
    def read(cls, args: EngineArgs) -> TextFiles:
        """Read them, downloading first where ``args`` names a remote model. Raises ``ModelError``."""
        files = resolve(args.model, args.revision, args.download_dir)
        source = files
        if args.tokenizer is not None:
            source = resolve(args.tokenizer, args.tokenizer_revision, args.download_dir)
        tokenizer = load_text_tokenizer(source, args.trust_remote_code)
        generation_config = load_generation_config(files)
        ends = generation_config.get("eos_token_id"), tokenizer.eos_token_id
        if args.generation_config not in ("auto", "vllm", "none"):
            generation_config = load_generation_config(resolve(args.generation_config))
        return cls(tokenizer, generation_config, ends, read_pooling(files, args.pooler_config))


class Frontend:
    """A model's text side. Safe to share between threads once built.

    ``generation_config`` is the checkpoint's; its sampling keys are defaults for what a request leaves open, unless
    ``args.generation_config`` is ``vllm`` or ``none``. ``eos_token_ids`` end every sequence.
    """

    def __init__(
        self,
        tokenizer: AnyTokenizer,
        info: EngineInfo,
        args: EngineArgs,
        generation_config: Mapping[str, Any] | None = None,
        eos_token_ids: Sequence[int] = (),
        pooling: Pooling | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.info = info
        self.args = args
        self.table = TokenTable(tokenizer)
        self.chat = ChatRenderer(tokenizer, args.chat_template)
        self.eos_token_ids = [i for i in eos_token_ids if i < info.vocab_size]
        used = dict(generation_config or {}) if args.generation_config not in ("vllm", "none") else {}
        self.sampling_defaults = sampling_defaults({**used, **args.override_generation_config})
        self._check_defaults()
        self.pooling = pooling or Pooling()
        self._longest_token = 0
        self._grammars = GrammarChecker()

    @classmethod
    def load(cls, args: EngineArgs, info: EngineInfo, files: TextFiles | None = None) -> Frontend:
        """The text side of ``args.model``, from ``files`` where they have been read. Raises ``ModelError``."""
        files = files or TextFiles.read(args)
        generation, tokenizer = files.ends
        ends = eos_token_ids(generation, info.eos_token_ids, tokenizer)
        return cls(files.tokenizer, info, args, files.generation_config, ends, files.pooling)

    def _check_defaults(self) -> None:
        """A default that no request may have is found at start, and not as the fault of each request."""
        try:
            params = self.default_params()
            if params.max_tokens == 0:
                raise ParameterError("max_new_tokens", "must be at least 1, got 0")
        except ParameterError as error:
            raise ModelError(
                f"the sampling defaults of generation_config.json are not valid: {error}. Set others with "
                "--override-generation-config, or leave the file out with --generation-config vllm"
            ) from error

    @property
    def limit(self) -> int:
        """Tokens that one sequence may have: the context, or the whole KV cache if that is smaller."""
        return min(self.info.max_model_len, self.info.kv_tokens)

    def default_params(self) -> SamplingParams:
        """vLLM's defaults, with the checkpoint's own on top."""
        return SamplingParams(**self.sampling_defaults)

    def request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str = "",
        add_special_tokens: bool = True,
        strict: bool = True,
        grammar_after: str = "",
        grammar_before: str = "",
    ) -> EngineRequest:
        """Tokenize and check one prompt (text or ids).

        ``params.max_tokens`` None becomes the checkpoint's ``max_new_tokens``, else all that fits. A given
        ``max_tokens`` that does not fit beside the prompt is refused, or cut where ``strict`` is False (vLLM offline,
        and where it is a default).
        ``params.structured_outputs`` applies once the answer has ``grammar_after`` in it, empty for at once;
        where ``grammar_before`` is not empty, also at once to an answer that does not begin with it.
        Raises ``ParameterError`` naming the field, or ``PromptTooLongError`` with the numbers.
        """
        self._check_request(params, priority, cache_salt)
        ids = self._prompt_ids(prompt, params, add_special_tokens)
        if params.truncate_prompt_tokens is not None:
            ids = ids[-self._truncation(params) :]
        if not ids:
            raise ParameterError("prompt", "is empty; give at least one token")
        wanted = params.structured_outputs
        grammar = "" if wanted is None else self.grammar(wanted)
        changes: dict[str, Any] = {"structured_outputs": None, "max_tokens": self._max_tokens(len(ids), params, strict)}
        if params.bad_words:
            changes["bad_words_token_ids"] = self._bad_words(params.bad_words)
        return EngineRequest(
            request_id=request_id,
            prompt_token_ids=ids,
            params=params.clone(**changes),
            arrival=time.time(),
            eos_token_ids=self.eos_token_ids,
            priority=priority,
            cache_salt=cache_salt,
            grammar=grammar,
            grammar_after=grammar_after if grammar else "",
            grammar_before=grammar_before if grammar else "",
        )

    def grammar(self, wanted: StructuredOutputsParams) -> str:
        """The grammar of a constraint. Known ones cost nothing; others may take seconds, and any thread will do.

        Raises ``ParameterError`` naming the field and what cannot be enforced.
        """
        if not self.table.exact:
            raise ParameterError(wanted.origin, "needs a tokenizer with bytes for its tokens, unlike this model's")
        if not self.eos_token_ids:
            raise ParameterError(wanted.origin, "needs a model with an end token; this one names none")
        return self._grammars.grammar(wanted)

    def pooling_request(
        self, prompt: str | Sequence[int], field: str, *, truncate: int | None = None, **options: Any
    ) -> EngineRequest:
        """A request for the vector of ``prompt``, which came in the body's ``field``; ``options`` as in ``request``.

        ``truncate`` keeps the last so many tokens; -1 all that fit. Raises as ``request``.
        """
        params = SamplingParams(max_tokens=0, truncate_prompt_tokens=truncate)
        try:
            made = self.request(prompt, params, **options)
        except ParameterError as error:
            if error.field != "prompt":
                raise
            raise ParameterError(field, error.detail) from error
        return msgspec.structs.replace(made, pooling=self.pooling.kind)

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """A conversation as text, for ``request(..., add_special_tokens=False)``.

        ``options``: see ``ChatRenderer.render``.
        """
        text = self.chat.render(messages, **options)
        check_text("messages", text)
        return text

    def processor(self, request: EngineRequest, prompt_text: str | None) -> OutputProcessor:
        """What turns the engine's outputs for ``request`` into results."""
        return OutputProcessor(request, prompt_text, self.table)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Raises ``ParameterError`` for text that is not valid Unicode."""
        check_text("prompt", text)
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is not None:
            ids: list[int] = backend.encode(text, add_special_tokens=add_special_tokens).ids
            return ids
        return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens shown. Raises ``ParameterError`` for an id outside the vocabulary."""
        self._check_ids("tokens", token_ids)
        return self.table.decode(token_ids, skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; empty for an id without text."""
        return self.table.raw(token_id)

    def _check_request(self, params: SamplingParams, priority: int, cache_salt: str) -> None:
        limit = self.args.max_logprobs if self.args.max_logprobs >= 0 else self.info.vocab_size
        params.check_vocabulary(self.info.vocab_size, limit)
        if params.n > self.info.max_num_seqs:
            raise ParameterError("n", f"at most {self.info.max_num_seqs} (--max-num-seqs), got {params.n}")
        if params.best_of not in (None, params.n):
            raise ParameterError("best_of", f"must equal n ({params.n}) here; ask for more answers with n and choose")
        for stop in params.stop_strings:
            check_text("stop", stop)
        if priority != 0 and self.args.scheduling_policy != "priority":
            raise ParameterError("priority", "needs a server started with --scheduling-policy priority")
        if len(cache_salt) > MAX_CACHE_SALT:
            raise ParameterError("cache_salt", f"at most {MAX_CACHE_SALT} characters, got {len(cache_salt)}")
        check_text("cache_salt", cache_salt)

    def _prompt_ids(self, prompt: str | Sequence[int], params: SamplingParams, add_special_tokens: bool) -> list[int]:
        if isinstance(prompt, str):
            if params.truncate_prompt_tokens is None:
                self._check_characters(prompt)
            ids = self.encode(prompt, add_special_tokens)
        else:
            ids = list(prompt)
        self._check_ids("prompt", ids)
        return ids

    def _check_ids(self, field: str, ids: Sequence[int]) -> None:
        size = self.info.vocab_size
        for i in ids:
            if type(i) is not int or not 0 <= i < size:
                raise ParameterError(field, f"token id {i!r} is outside the vocabulary of {size}")

    def _check_characters(self, text: str) -> None:
        """Refuse what cannot fit before spending seconds on tokenizing it; twice the longest token is the allowance."""
        if not self.table.exact or len(text) < 64 * self.limit:
            return
        if not self._longest_token:
            self._longest_token = max(map(len, self.tokenizer.get_vocab()))
        least = len(text) // (2 * self._longest_token)
        if least > self.limit:
            raise PromptTooLongError(self._too_long(f"{len(text)} characters, at least {least} tokens"))

    def _truncation(self, params: SamplingParams) -> int:
        wanted = params.truncate_prompt_tokens
        assert wanted is not None
        if wanted > self.limit:
            raise ParameterError("truncate_prompt_tokens", f"at most {self.limit}, got {wanted}")
        reserve = 1 if params.max_tokens is None else params.max_tokens
        return wanted if wanted > 0 else max(1, self.limit - reserve)

    def _max_tokens(self, length: int, params: SamplingParams, strict: bool) -> int:
        room = self.limit - length
        wanted = params.max_tokens
        if room < 0 or (room == 0 and wanted != 0):
            raise PromptTooLongError(self._too_long(f"{length} tokens"))
        if wanted is None:
            return min(room, int(self.sampling_defaults.get("max_tokens", room)))
        if wanted > room and strict:
            raise PromptTooLongError(
                f"The prompt has {length} tokens and max_tokens is {wanted}, together {length + wanted}; "
                f"{self._limit_text()}. Shorten the prompt or ask for at most {room}."
            )
        return min(wanted, room)

    def _too_long(self, size: str) -> str:
        return f"The prompt has {size}; {self._limit_text()}, one token of which is for the answer. Shorten the prompt."

    def _limit_text(self) -> str:
        if self.info.kv_tokens < self.info.max_model_len:
            return (
                f"the KV cache holds {self.info.kv_tokens} tokens (the model's maximum context length is "
                f"{self.info.max_model_len})"
            )
        return f"this model's maximum context length is {self.info.max_model_len} tokens"

    def _bad_words(self, words: Sequence[str]) -> list[list[int]]:
        """Ids of each word, as it stands and after a space where that is another single unit (vLLM's rule)."""
        found: list[list[int]] = []
        for word in words:
            check_text("bad_words", word)
            plain = self.encode(word.lstrip(), add_special_tokens=False)
            spaced = self.encode(" " + word.lstrip(), add_special_tokens=False)
            if not plain:
                raise ParameterError("bad_words", f"{word!r} has no tokens")
            found.append(plain)
            if len(spaced) == len(plain) and spaced[0] != plain[0]:
                found.append(spaced)
        for ids in found:
            self._check_ids("bad_words", ids)
        return found


def check_text(field: str, text: str) -> None:
    """Refuse text that has no UTF-8 form. Raises ``ParameterError`` naming the field."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        bad = ord(text[error.start])
        raise ParameterError(
            field, f"has an unpaired surrogate (U+{bad:04X}) at character {error.start}, which is not valid text"
        ) from None
