"""Triton's generate extension and what of KServe's protocol its clients ask before they generate.

Source: Triton generate 2.68; contracts/triton_generate.md section 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from handlers.contracts.family import Family, Generates, Operation, Route, Tells
from handlers.contracts.protocol import Reply
from handlers.contracts.triton import model
from handlers.contracts.triton.errors import missing_model, refusal
from handlers.contracts.triton.generate import TritonContract
from handlers.contracts.triton.schemas import (
    GENERATE,
    GENERATE_STREAM,
    INDEX,
    INFER,
    LOAD,
    UNLOAD,
    document,
    probe,
)
from handlers.model_settings import ModelSettings

_MODEL = "/v2/models/{model}"
_MODEL_PATHS = (_MODEL, _MODEL + "/versions/{version:int}")


def _of_model(path: str, tell: model.Tell, about: Operation, method: str = "GET") -> tuple[Tells, ...]:
    """A route below the model, with and without a version."""
    return tuple(Tells(path=prefix + path, tell=tell, methods=(method,), about=about) for prefix in _MODEL_PATHS)


def _generates(path: str, about: Operation, *, events: bool) -> tuple[Generates, ...]:
    contract = partial(TritonContract, events=events)
    return tuple(
        Generates(path=prefix + path, contract=contract, refuse_path=_unknown_model, about=about)
        for prefix in _MODEL_PATHS
    )


def _unknown_model(names: Mapping[str, str], settings: ModelSettings) -> Reply | None:
    return missing_model(settings.name, names["model"], names.get("version"))


_ROUTES: tuple[Route, ...] = (
    *_generates("/generate", GENERATE, events=False),
    *_generates("/generate_stream", GENERATE_STREAM, events=True),
    Tells(
        path="/v2", tell=model.server_metadata, tell_all=model.all_metadata, about=document("Server metadata (KServe)")
    ),
    Tells(
        path="/v2/health/live", tell=model.live, tell_all=model.all_live, about=probe("Does the server live? (KServe)")
    ),
    Tells(
        path="/v2/health/ready",
        tell=model.ready,
        tell_all=model.all_ready,
        about=probe("Is the server ready? (KServe)"),
    ),
    Tells(
        path="/v2/models/stats",
        tell=model.statistics,
        tell_all=model.all_statistics,
        about=document("Statistics of all models (Triton)"),
    ),
    *_of_model("", model.metadata, document("Model metadata (KServe)")),
    *_of_model("/ready", model.model_ready, probe("Is the model ready? (KServe)")),
    *_of_model("/config", model.configuration, document("Model configuration (Triton)")),
    *_of_model("/stats", model.model_statistics, document("Statistics of the model (Triton)")),
    *_of_model("/infer", model.infer, INFER, method="POST"),
    Tells(
        path="/v2/repository/index",
        tell=model.repository_index,
        tell_all=model.all_index,
        methods=("POST",),
        about=INDEX,
    ),
    Tells(path="/v2/repository/models/{model}/load", tell=model.load, methods=("POST",), about=LOAD),
    Tells(path="/v2/repository/models/{model}/unload", tell=model.unload, methods=("POST",), about=UNLOAD),
)

TRITON = Family(
    name="triton",
    routes=_ROUTES,
    refuse=refusal,
    wrong_method=model.wrong_method,
    prefix="/v2/",
    not_found=model.not_found,
)
"""Clients of NVIDIA's Triton Inference Server."""
