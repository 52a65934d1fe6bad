"""Describes vLLM's pooling models, and refuses requests that do not fit them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from vllm.config import ModelConfig
from vllm.model_executor.model_loader import get_model_cls
from vllm.model_executor.models.interfaces import supports_score_template
from vllm.tasks import POOLING_TASKS
from vllm.transformers_utils.config import get_pooling_config
from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

from engines.errors import InvalidRequest
from engines.interface import EngineStartError
from engines.pooling import Pooling, PoolingModel, kind_of_model
from engines.settings.engine_config import EngineConfig

logger = logging.getLogger(__name__)

_SENTENCE_TRANSFORMERS = "config_sentence_transformers.json"
_SPARSE = "BertSpladeSparseEmbeddingModel"  # vLLM's only model with sparse vectors.


def model_of(
    model_config: ModelConfig, tasks: Collection[str], frontend: Mapping[str, Any], config: EngineConfig
) -> PoolingModel | None:
    """Return the description of a pooling model; None if the model generates text.

    Args:
        model_config: vLLM's configuration of the model.
        tasks: The model's tasks in vLLM's engine.
        frontend: The arguments of vLLM's front end.
        config: Slipway's settings of the model.

    Raises:
        EngineStartError: The model has no prompt named `default_prompt_name`, or both `default_prompt_name` and
            `default_prompt` are given.
    """
    if "generate" in tasks or not frozenset(tasks).intersection(POOLING_TASKS):
        return None
    task: Any = model_config.get_pooling_task(tuple(tasks))
    hf_config = model_config.hf_config
    # If a configuration has no labels, transformers adds two: `LABEL_0` and `LABEL_1`.
    labels = {int(number): str(name) for number, name in (getattr(hf_config, "id2label", None) or {}).items()}
    pooler = model_config.pooler_config
    sparse = model_config.architecture == _SPARSE
    size = model_config.get_vocab_size() if sparse else model_config.embedding_size
    prompts = _prompts(model_config)
    return PoolingModel(
        kind=kind_of_model(task, getattr(hf_config, "num_labels", 0)),
        task=task,
        tasks=frozenset(tasks).intersection(POOLING_TASKS),
        vector_size=size if task in ("embed", "token_embed") else 0,
        labels=labels,
        pooling="SPLADE" if sparse else (pooler.seq_pooling_type or "") if pooler is not None else "",
        dtype=str(model_config.dtype).removeprefix("torch."),
        problem_type=getattr(hf_config, "problem_type", None) or "",
        lower_case=bool((model_config.encoder_config or {}).get("do_lower_case")),
        pairs_refusal=_pairs_refusal(model_config, frontend) if task == "classify" else "the model scores no pairs",
        prompts=prompts,
        default_prompt=_default_prompt(config, prompts),
    )


def pool_as_djl(model_config: ModelConfig) -> None:
    """Use the mean of the tokens' vectors if the model's files do not define the pooling.

    DJL's engines do the same.
    """
    pooler = model_config.pooler_config
    if pooler is None or any("ForSequenceClassification" in name for name in model_config.architectures):
        return
    if get_pooling_config(model_config.model, model_config.revision) is None:
        pooler.seq_pooling_type = "MEAN"


def check_pooling(pooling: Pooling | None, model: PoolingModel | None) -> None:
    """Refuse a request for a kind of answer that the model does not make.

    Args:
        pooling: The pooling that the request wants. None: the request wants text.
        model: The model. None: the model generates text.

    Raises:
        InvalidRequest: The model does not make such answers.
    """
    if model is None:
        if pooling is not None:
            raise InvalidRequest("the model generates text; it makes no vectors")
    elif pooling is None:
        raise InvalidRequest(f"the model is of the kind {model.kind}; it generates no text")
    elif pooling.task not in model.tasks:
        raise InvalidRequest(f"the model is of the kind {model.kind}; it has no task {pooling.task}")
    elif pooling.second is not None and model.pairs_refusal:
        raise InvalidRequest(model.pairs_refusal)


def _pairs_refusal(model_config: ModelConfig, frontend: Mapping[str, Any]) -> str:
    """Return the reason why the texts of a pair cannot be tokenized together for the model; "" if they can.

    Rerankers that are made from generative models have a template for pairs. Only vLLM's own routes apply it.
    """
    if frontend.get("chat_template") is not None or supports_score_template(get_model_cls(model_config)):
        return "the model has a template for pairs; send `query` and `documents` to /rerank"
    if not model_config.use_sep_token:
        return "the model joins pairs in its own way; send `query` and `documents` to /rerank"
    return ""


def _default_prompt(config: EngineConfig, prompts: Mapping[str, str]) -> str | None:
    name = config.default_prompt_name
    if name is None:
        return config.default_prompt
    if config.default_prompt is not None:
        raise EngineStartError("only one of option.default_prompt and option.default_prompt_name can be set")
    if name not in prompts:
        known = f"allowed: {', '.join(prompts)}" if prompts else f"the model has no prompts in {_SENTENCE_TRANSFORMERS}"
        raise EngineStartError(f"option.default_prompt_name is {name!r}; {known}")
    return prompts[name]


def _prompts(model_config: ModelConfig) -> dict[str, str]:
    """Return the prefixes for texts, keyed by their names in sentence-transformers' file."""
    try:
        given = get_hf_file_to_dict(_SENTENCE_TRANSFORMERS, model_config.model, model_config.revision) or {}
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be read, so no prompts are known by name: %s", _SENTENCE_TRANSFORMERS, error)
        return {}
    return {name: text for name, text in (given.get("prompts") or {}).items() if isinstance(text, str)}
