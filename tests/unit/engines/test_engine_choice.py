"""`option.rolling_batch`: the engine that runs a model, and the messages about it in the log."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from engines import engine_choice
from engines.engine_choice import begin_import, choose_engine, is_vllm, running_engine
from engines.interface import EngineStartError
from handlers.model_config import ModelConfig


def settings(rolling_batch: str = "auto", **fields: Any) -> ModelConfig:
    return ModelConfig(name="m", model_dir=Path("/m"), model_id="/m", rolling_batch=rolling_batch, **fields)


@pytest.fixture
def with_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_choice, "_vllm_is_installed", lambda: True)


@pytest.fixture
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_choice, "_vllm_is_installed", lambda: False)


@pytest.mark.usefixtures("without_vllm")
def test_auto_without_vllm_is_the_dynamic_batch(caplog: pytest.LogCaptureFixture) -> None:
    config = choose_engine(settings())
    assert (config.rolling_batch, is_vllm(config), running_engine(config)[0]) == ("disable", False, "dynamic_batch")
    [message] = caplog.messages
    assert message.startswith("option.rolling_batch=auto: ")
    assert choose_engine(settings("disable")) == settings("disable")


@pytest.mark.usefixtures("without_vllm")
def test_the_dynamic_batch_runs_one_copy_and_says_so_if_more_were_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    for most, said in ((None, False), (1, False), (4, True)):
        caplog.clear()
        config = choose_engine(settings(max_copies=most, min_copies=most))
        assert (config.max_copies, config.min_copies) == (1, None)
        assert [("maxWorkers" in message) for message in caplog.messages] == [said]


@pytest.mark.usefixtures("without_vllm")
@pytest.mark.parametrize("rolling_batch", ["vllm", "lmi-dist", "trtllm", "scheduler"])
def test_an_engine_that_is_not_installed_is_an_error_that_says_what_to_install(rolling_batch: str) -> None:
    with pytest.raises(EngineStartError) as caught:
        choose_engine(settings(rolling_batch))
    assert str(caught.value).startswith(
        f"option.rolling_batch={rolling_batch} runs on vLLM, which is not installed: "
        "install requirements/gpu.txt, or requirements/cpu.txt if there is no GPU (`make install`)"
    )


@pytest.mark.usefixtures("with_vllm")
@pytest.mark.parametrize(
    ("rolling_batch", "arguments", "message"),
    [
        ("trtllm", {}, "vLLM runs the model, with TensorRT-LLM's parameters and defaults"),
        ("scheduler", {}, "vLLM runs the model with model_impl=transformers, with the scheduler's parameters"),
        (
            "scheduler",
            {"model_impl": "auto"},
            "vLLM runs the model with model_impl=auto, with the scheduler's parameters",
        ),
    ],
)
def test_with_vllm_it_runs_auto_and_other_backends_and_the_log_names_their_parameters(
    rolling_batch: str, arguments: dict[str, str], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    given = settings(rolling_batch, engine_arguments=arguments)
    with caplog.at_level(logging.INFO):
        assert choose_engine(settings()).rolling_batch == "vllm"
        assert choose_engine(given) == given
    assert caplog.messages == [f"option.rolling_batch={rolling_batch}: {message}"]
    assert (is_vllm(given), running_engine(given)[0]) == (True, "vllm")


def test_variables_of_a_model_are_set_before_its_engine_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIXTURE_VARIABLE", "former")
    given = settings("disable", environment={"FIXTURE_VARIABLE": "of the model"})
    begin_import(given)
    assert os.environ["FIXTURE_VARIABLE"] == "of the model"
