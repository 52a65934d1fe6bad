"""The settings of `/invocations`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from engines.settings.declaration import Setting, setting
from engines.settings.parsers import BOOLEAN, STRINGS, TEXT, Parser, choice, integer, matching
from handlers.custom.settings import ASYNC_MODE

OutputFormatter = Literal["json", "jsonlines", "sse"]
ChatFormat = Literal["lmi", "openai"]
VectorFormat = Literal["djl", "vllm"]

FORMATTERS = get_args(OutputFormatter)  # The built-in output formatters.
_WORD = matching(r"\w+", "a name")


def _formatter(text: str) -> str:
    return text.lower() if text.lower() in FORMATTERS else _WORD(text)


OUTPUT_FORMATTER: Setting[Any] = Setting(
    "option.output_formatter",
    Parser(_formatter, "json, jsonlines, sse, or the name of a function in model.py"),
    doc="Format of answers; default: the request decides",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LmiConfig:
    """Settings of `/invocations`: the schema of requests, the form of answers, and sessions."""

    # Stop strings that apply to every request of the dynamic batch.
    stop_sequences: tuple[str, ...] = setting(
        "option.stop_sequence", STRINGS, unset=(), doc="Stop strings of the dynamic batch"
    )
    output_formatter: OutputFormatter | None = field(default=None, metadata=OUTPUT_FORMATTER.metadata)
    # The name of the output formatter in `model.py`, if it is not a built-in formatter.
    formatter_function: str | None = None
    tgi_compat: bool = setting("option.tgi_compat", BOOLEAN, "false", doc="Answer `inputs` with TGI's field names")
    # Whether to use the schemas of LMI's asynchronous handler.
    async_mode: bool = field(default=False, metadata=ASYNC_MODE.metadata)
    # Whether the answers to chats are objects of LMI's rolling batch or OpenAI's objects.
    chat_format: ChatFormat = setting(
        "option.chat_format",
        choice({word: word for word in get_args(ChatFormat)}),
        "lmi",
        doc="Form of the answers to `messages` on `/invocations`",
    )
    # Whether each token has its log probability, which takes time to compute. If not, `log_prob` is null.
    token_logprobs: bool = setting(
        "option.token_logprobs", BOOLEAN, "true", doc="Compute each token's `log_prob`; false is faster"
    )
    enable_stateful_sessions: bool = setting(
        "option.enable_stateful_sessions", BOOLEAN, "true", doc="Serve [sessions](sessions.md) on `/invocations`"
    )
    sessions_expiration: int = setting(
        "option.sessions_expiration", integer(1, 10**9), "1200", doc="Lifetime of a session, in seconds"
    )
    sessions_path: str | None = setting(
        "option.sessions_path", TEXT, doc="Directory of sessions; default: `/dev/shm/djl_sessions`"
    )
    sessions_s3url: str | None = setting(
        "option.sessions_s3url",
        TEXT,
        doc="S3 prefix to which sessions are saved, so that other containers can continue them",
    )
    normalize: bool = setting(
        "option.normalize",
        BOOLEAN,
        "true",
        aliases=("normalize",),
        shows_default=False,
        doc="Scale the vectors on `/invocations` to the length 1",
    )
    sigmoid: bool = setting(
        "option.sigmoid",
        BOOLEAN,
        "true",
        aliases=("sigmoid",),
        shows_default=False,
        doc="The score of a pair on `/invocations` passes through a sigmoid",
    )
    # Whether vectors have the form of DJL's engines or the form of LMI's vLLM handler.
    vector_format: VectorFormat = "djl"
    # Whether bodies with `query` and `texts` get DJL's scores. If not, they get TEI's ranks.
    scores_in_order: bool = False


RERANKING = Setting(
    "option.reranking",
    BOOLEAN,
    "false",
    aliases=("reranking",),
    shows_default=False,
    doc="The model scores pairs, and `query` with `texts` gets [DJL's scores](retrieval.md#lmi)",
)
