"""Tokenizes the prompts of chats and completions for `/tokenize`, and makes the prompts of chats for other contracts.

`OnlineRenderer.render_chat` checks `tool_choice`, and makes the prompt of a chat. `ServingTokenization` answers
`/tokenize` for a body that has a `prompt`. Its `_check_model` checks a body's `model`. tests/live/test_tgi_live.py
checks these internals.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest, TokenizeCompletionRequest, TokenizeResponse
from vllm.entrypoints.serve.utils.api_utils import with_cancellation

from handlers.contract import JSON
from handlers.openai.vllm.request_models import stop_at_first_fault
from handlers.route_declarations import RenderedChat


class CountedChat(ChatCompletionRequest, TokenizeChatRequest):  # type: ignore[misc]
    """A chat whose prompt is only tokenized. The prompt may be longer than the model's context."""

    build_tok_params = TokenizeChatRequest.build_tok_params


stop_at_first_fault(CountedChat)


@with_cancellation  # type: ignore[untyped-decorator]
async def tokenize(request: TokenizeCompletionRequest | CountedChat, raw_request: Request) -> JSONResponse:
    """Answer `/tokenize`."""
    state = raw_request.app.state
    if isinstance(request, TokenizeCompletionRequest):
        answer = await state.serving_tokenization.create_tokenize(request, raw_request)
    elif isinstance(answer := await _rendered(request, state), RenderedChat):
        ids = answer.token_ids
        tokenizer = state.online_renderer.renderer.get_tokenizer()
        answer = TokenizeResponse(
            count=len(ids),
            max_model_len=state.online_renderer.model_config.max_model_len,
            tokens=ids,
            token_strs=tokenizer.convert_ids_to_tokens(ids) if request.return_token_strs else None,
        )
    return JSONResponse(answer.model_dump(), answer.error.code if isinstance(answer, ErrorResponse) else 200)


@with_cancellation  # type: ignore[untyped-decorator]
async def render(request: CountedChat, raw_request: Request) -> Response:
    """Answer `RENDER`, the internal path through which other contracts get the prompt of a chat."""
    answer = await _rendered(request, raw_request.app.state)
    if isinstance(answer, RenderedChat):
        return Response(msgspec.json.encode(answer), media_type=JSON)
    return JSONResponse(answer.model_dump(), answer.error.code)


async def _rendered(request: CountedChat, state: Any) -> RenderedChat | ErrorResponse:
    """Return the prompt that vLLM's `/v1/chat/completions` makes from a chat.

    vLLM's own `/tokenize` prepares messages in another way, and does not read all fields.
    """
    online = state.online_renderer
    if (refused := await state.serving_tokenization._check_model(request)) is not None:
        return refused
    if request.tool_choice != "none" and getattr(online.parser, "tool_parser_cls", None) is None:
        # vLLM would refuse `tool_choice` without a tool-call parser, but making a prompt needs no parser.
        request.tool_choice = None
    found = await online.render_chat(request, skip_mm_cache=True)
    if isinstance(found, ErrorResponse):
        return found
    (prompt,) = found[1]
    return RenderedChat(list(prompt.get("prompt_token_ids") or ()), prompt.get("prompt"))
