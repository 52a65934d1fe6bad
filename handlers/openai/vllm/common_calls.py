"""Reads the settings of vLLM's front end that Slipway's own contract needs to answer common calls."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import vllm.envs as envs
from fastapi import FastAPI
from vllm.renderers.hf import HfRenderer

from handlers.openai.contract import FrontEnd
from handlers.openai.vllm.chat_prompts import chat_renderer


def front_end(
    app: FastAPI, config: Any, model: str, accepts: Callable[[str], bool], adapters: Collection[str]
) -> FrontEnd | None:
    """Return the settings for the contract of common requests.

    Args:
        app: The application that `build` returned.
        config: vLLM's configuration.
        model: The model's name in answers.
        accepts: Returns True if a name is the model's.
        adapters: The names of the adapters.

    Returns:
        The settings. None if the model does not generate, or if Slipway's contract cannot give vLLM's answers.
    """
    if not hasattr(app.state, "openai_serving_chat"):
        return None
    chat, completions = app.state.openai_serving_chat, app.state.openai_serving_completion
    if not isinstance(chat.renderer, HfRenderer) or _shows_more(completions, config):
        return None
    if getattr(app.state.args, "sse_keep_alive_interval", 0):
        return None
    return FrontEnd(
        model=model,
        accepts=accepts,
        adapters=adapters,
        fingerprint=completions.system_fingerprint,
        role=chat.response_role,
        default_sampling=completions.default_sampling_params,
        most_new_tokens=completions.override_max_tokens,
        max_model_len=completions.model_config.max_model_len,
        most_prompts=envs.VLLM_MAX_COMPLETION_PROMPTS,
        most_sequences=envs.VLLM_MAX_N_SEQUENCES,
        most_stop_strings=envs.VLLM_MAX_STOP_STRINGS,
        # If vLLM has a parser, it searches each answer for tool calls or reasoning.
        render=chat_renderer(chat) if chat.parser_cls is None and not chat.online_renderer.use_harmony else None,
    )


def _shows_more(serving: Any, config: Any) -> bool:
    """Return True if an option changes answers or generation, and Slipway's contract does not support it."""
    model = config.model_config
    return any(
        (
            serving.enable_prompt_tokens_details,
            serving.enable_force_include_usage,
            serving.enable_per_request_metrics,
            serving.return_tokens_as_token_ids,
            serving.request_logger is not None,
            model.enable_prompt_embeds,
            config.aux_output_config.enabled,
            model.return_sampling_mask,
            model.is_encoder_decoder,
            model.is_diffusion,
            (model.encoder_config or {}).get("do_lower_case", False),
            config.speculative_config,
            config.kv_transfer_config,
            config.ec_transfer_config,
            config.watermark_config,
            config.observability_config.otlp_traces_endpoint,
            config.scheduler_config.stream_interval != 1,
        )
    )


def chunks_long_prompts(config: Any) -> bool:
    """Return True if vLLM's front end joins the vectors of a long text's parts, or has its own limit on long texts."""
    pooler = config.model_config.pooler_config
    return bool(pooler.enable_chunked_processing or pooler.max_embed_len)
