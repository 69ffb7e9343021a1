"""``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

from fastapi import APIRouter, Request

from qiao.frontend import Frontend
from qiao.server.args import ServerArgs
from qiao.server.body import StrictRoute
from qiao.server.fleet import open_model
from qiao.server.protocol.tokenize import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse
from qiao.server.routes.shared import ERRORS

router = APIRouter(route_class=StrictRoute)


@router.post("/tokenize", responses=ERRORS, response_model_exclude_unset=True)
async def tokenize(body: TokenizeRequest, request: Request) -> TokenizeResponse:
    """Token ids of a prompt, or of a conversation after its template."""
    state, _ = open_model(request, body.model)
    tokens = await state.in_worker(_ids, state.frontend, body, state.server_args)
    answer = TokenizeResponse(count=len(tokens), max_model_len=state.client.info.max_model_len, tokens=tokens)
    if body.return_token_strs:
        names = state.frontend.tokenizer.convert_ids_to_tokens(tokens)
        answer.token_strs = [str(name) for name in names]
    return answer


def _ids(frontend: Frontend, body: TokenizeRequest, args: ServerArgs) -> list[int]:
    if body.messages is None:
        assert body.prompt is not None, "checked by the body"
        return frontend.encode(body.prompt, body.add_special_tokens is not False)
    messages = [message.plain() for message in body.messages]
    text = frontend.chat_prompt(
        messages,
        chat_template_kwargs={**args.default_chat_template_kwargs, **(body.chat_template_kwargs or {})},
        content_format=args.chat_template_content_format,
        tools=body.tools,
        continue_final_message=body.continue_final_message,
        add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
    )
    return frontend.encode(text, bool(body.add_special_tokens))


@router.post("/detokenize", responses=ERRORS)
async def detokenize(body: DetokenizeRequest, request: Request) -> DetokenizeResponse:
    """The text of token ids, specials included."""
    state, _ = open_model(request, body.model)
    return DetokenizeResponse(prompt=await state.in_worker(state.frontend.decode, body.tokens))
