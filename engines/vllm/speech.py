"""Models that only transcribe audio, such as Whisper. vLLM's front end serves them (`handlers.openai.media.speech`)."""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.config.speech_to_text import SpeechToTextParams
from vllm.model_executor.model_loader import get_model_cls
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.v1.engine.async_llm import AsyncLLM


async def silence(llm: AsyncLLM) -> Any:
    """Return a prompt that asks the model to transcribe one second of silence, in vLLM's form."""
    config = llm.model_config
    model: Any = get_model_cls(config)
    speech = model.get_speech_to_text_config(config, "transcribe")
    params = SpeechToTextParams(
        audio=np.zeros(int(speech.sample_rate), np.float32),
        stt_config=speech,
        model_config=config,
        language=model.validate_language("en"),
        task_type="transcribe",
        request_prompt="",
        to_language=None,
        hotwords=None,
    )
    (prompt,) = await llm.renderer.render_cmpl_async([parse_model_prompt(config, model.get_generation_prompt(params))])
    return prompt
