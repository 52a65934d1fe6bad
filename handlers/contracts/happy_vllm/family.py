"""happy_vllm's clients: the deprecated generating routes of releases up to 1.1.15, and the routes beside OpenAI's.

`/v1/completions`, `/v1/chat/completions` and `/v1/models` are vLLM's own and belong to the OpenAI family.
Source: happy_vllm_generate; contracts/happy_vllm.md section 1.
"""

from __future__ import annotations

from handlers.contracts.family import ContractSetting, Family, Generates, Tells
from handlers.contracts.happy_vllm import openapi as about
from handlers.contracts.happy_vllm import technical, tokens
from handlers.contracts.happy_vllm.errors import refuse, wrong_method
from handlers.contracts.happy_vllm.generate import HappyVllmContract


def _generate(setting: ContractSetting) -> HappyVllmContract:
    return HappyVllmContract(stream=False)


def _generate_stream(setting: ContractSetting) -> HappyVllmContract:
    return HappyVllmContract(stream=True)


_POST = ("POST",)

HAPPY_VLLM = Family(
    name="happy_vllm",
    routes=(
        Generates(path="/v1/generate", contract=_generate, about=about.GENERATE),
        Generates(path="/v1/generate_stream", contract=_generate_stream, about=about.GENERATE_STREAM),
        Tells(path="/v1/tokenizer", tell=tokens.tokenizer, methods=_POST, about=about.TOKENIZER),
        Tells(path="/v1/decode", tell=tokens.decode, methods=_POST, about=about.DECODE),
        Tells(path="/v2/tokenizer", tell=tokens.tokenizer_v2, methods=_POST, about=about.TOKENIZER_V2),
        Tells(path="/v2/decode", tell=tokens.decode_v2, methods=_POST, about=about.DECODE_V2),
        Tells(path="/v1/split_text", tell=tokens.split, methods=_POST, about=about.SPLIT_TEXT),
        Tells(path="/v1/metadata_text", tell=tokens.metadata, methods=_POST, about=about.METADATA_TEXT),
        Tells(
            path="/v1/abort_request",
            tell=technical.abort_request,
            methods=_POST,
            about=about.ABORT_REQUEST,
        ),
        Tells(path="/liveness", tell=technical.liveness, tell_all=technical.all_liveness, about=about.LIVENESS),
        Tells(path="/readiness", tell=technical.readiness, tell_all=technical.all_readiness, about=about.READINESS),
        Tells(path="/v1/info", tell=technical.info, about=about.INFO),
        Tells(path="/v1/launch_arguments", tell=technical.launch_arguments, about=about.LAUNCH_ARGUMENTS),
        Tells(path="/live_metrics", tell=technical.live_metrics, about=about.LIVE_METRICS),
    ),
    refuse=refuse,
    wrong_method=wrong_method,
)
