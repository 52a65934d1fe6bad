from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from djl_python import Input
from djl_python.input_parser import init_handler, input_formatter, prediction_handler
from djl_python.service_loader import (
    find_decorated_function,
    get_annotated_function,
    has_function_in_module,
    load_model_service,
)

DECORATED = """
from djl_python.input_parser import init_handler, input_formatter, prediction_handler
from djl_python.output_formatter import output_formatter

@output_formatter
def z_format(output): return "z"

@output_formatter
def a_format(output): return "a"

@input_formatter
def parse(item, **kwargs): return item

def output_fn(prediction, accept): return "sagemaker"

def input_fn(request_body, request_content_type): return "sagemaker"
"""
SAGEMAKER = """
def model_fn(model_dir): return model_dir
def input_fn(request_body, content_type): return request_body
def predict_fn(input_data, model, context): return input_data
def output_fn(prediction, response_content_type): return prediction
"""


def model(directory: Path, text: str) -> str:
    (directory / "model.py").write_text(text)
    return str(directory)


def test_decorators_only_mark_a_function() -> None:
    for decorator, mark in (
        (input_formatter, "is_input_formatter"),
        (prediction_handler, "is_prediction_handler"),
        (init_handler, "is_init_handler"),
    ):

        def function(value: int) -> int:
            return value + 1

        assert decorator(function) is function
        assert getattr(function, mark) is True
        assert function(1) == 2


@pytest.mark.parametrize(("mark", "name"), [("is_output_formatter", "a_format"), ("is_input_formatter", "parse")])
def test_the_first_marked_function_by_name_is_found_before_a_sagemaker_function(
    tmp_path: Path, mark: str, name: str
) -> None:
    found = get_annotated_function(model(tmp_path, DECORATED), mark)
    assert found is not None
    assert found.__name__ == name


def test_a_marked_function_of_a_module_that_has_been_imported_is_found(tmp_path: Path) -> None:
    module = load_model_service(model(tmp_path, DECORATED), "model.py").module
    assert find_decorated_function(module, "is_output_formatter") is module.a_format
    assert find_decorated_function(module, "is_init_handler") is None
    assert find_decorated_function(load_model_service(str(tmp_path), "json").module, "is_output_formatter") is None


def test_sagemaker_functions_are_found_if_their_parameters_have_the_right_names(tmp_path: Path) -> None:
    directory = model(tmp_path, SAGEMAKER)
    names = {
        mark: getattr(get_annotated_function(directory, mark), "__name__", None)
        for mark in ("is_init_handler", "is_input_formatter", "is_prediction_handler", "is_output_formatter", "is_x")
    }
    assert names == {
        "is_init_handler": "model_fn",
        "is_input_formatter": "input_fn",
        "is_prediction_handler": None,
        "is_output_formatter": "output_fn",
        "is_x": None,
    }


def test_no_file_or_no_such_function_is_none(tmp_path: Path) -> None:
    assert get_annotated_function(str(tmp_path), "is_output_formatter") is None
    assert get_annotated_function(model(tmp_path, "x = 1"), "is_output_formatter") is None


@pytest.mark.parametrize(
    ("text", "error"),
    [("import no_such_module", ImportError), ("x = ", SyntaxError), ("raise ValueError()", ValueError)],
)
def test_a_file_that_cannot_be_run_is_an_error(tmp_path: Path, text: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        get_annotated_function(model(tmp_path, text), "is_output_formatter")


def test_adapters_have_modules_of_their_own(tmp_path: Path) -> None:
    directory = model(tmp_path, DECORATED)
    base = load_model_service(directory, "model.py", "-1").module
    adapter = load_model_service(directory, "model.py", -1, namespace="my-adapter").module
    other = load_model_service(directory, "model.py", -1, namespace="my.adapter").module
    assert len({base.__name__, adapter.__name__, other.__name__}) == 3
    assert adapter.__name__.startswith("ns_my_adapter")


def test_a_handler_is_called_with_the_model_directory(tmp_path: Path) -> None:
    directory = model(
        tmp_path, "def handle(inputs): return inputs.get_property('model_dir')\nasync def awaited(inputs): return 5"
    )
    service = load_model_service(directory, "model.py")
    assert service.invoke_handler("handle", Input()) == directory
    assert asyncio.run(service.invoke_handler_async("handle", Input())) == directory
    assert asyncio.run(service.invoke_handler_async("awaited", Input())) == 5
    with pytest.raises(AttributeError):
        service.invoke_handler("predict", Input())


def test_an_entry_point_may_be_an_installed_module(tmp_path: Path) -> None:
    service = load_model_service(str(tmp_path), "djl_python.utils")
    assert has_function_in_module(service.module, "is_best_of")
    assert not has_function_in_module(service.module, "handle")


def test_a_missing_file_and_a_torchserve_archive_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="entry-point file not found"):
        load_model_service(str(tmp_path), "model.py")
    (tmp_path / "MAR-INF").mkdir()
    (tmp_path / "MAR-INF" / "MANIFEST.json").write_text("{}")
    with pytest.raises(ValueError, match="TorchServe archive"):
        load_model_service(str(tmp_path), "model.py")


def test_a_module_that_failed_is_forgotten(tmp_path: Path) -> None:
    directory = model(tmp_path, "raise RuntimeError('first')")
    with pytest.raises(RuntimeError, match="first"):
        load_model_service(directory, "model.py")
    model(tmp_path, "handle = 1  # corrected")
    os.utime(tmp_path / "model.py", (1, 1))
    assert load_model_service(directory, "model.py").module.handle == 1
