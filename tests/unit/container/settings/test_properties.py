from __future__ import annotations

from pathlib import Path

import javaproperties
import pytest
from hypothesis import given
from hypothesis import strategies as st

from container.settings.aliases import read_variables
from container.settings.properties import (
    Value,
    option_layer,
    parse_properties,
    read_properties,
    sagemaker_model_layer,
    sagemaker_server_layer,
    serving_layer,
)


def read_environment(environ: dict[str, str], problems: list[str]) -> dict[str, Value]:
    return read_variables(environ, problems, [])[0]


def texts(layer: dict[str, Value]) -> dict[str, str]:
    return {key: value.text for key, value in layer.items()}


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"a=1", {"a": "1"}),
        (b"a:1\r\nb 2\rc\t=\t3\n", {"a": "1", "b": "2", "c": "3"}),
        (b"# comment \\\n! another\n\n  a = 1", {"a": "1"}),
        (b"a=one \\\n   two", {"a": "one two"}),
        (b"a=trailing  \n", {"a": "trailing  "}),
        (b"a=\\u00e9\\t\\\\", {"a": "é\t\\"}),
        (b"a=\xe9", {"a": "é"}),
        (b"a=\\ud83d\\ude00", {"a": "\U0001f600"}),
        (b"a\\=b=c=d", {"a=b": "c=d"}),
        (b"a", {"a": ""}),
        (b"a=1\na=2", {"a": "2"}),
        (b"", {}),
    ],
)
def test_a_file_is_read_as_java_reads_it(data: bytes, expected: dict[str, str]) -> None:
    file = parse_properties(data)
    assert texts(dict(file.values)) == expected
    assert file.problems == ()


def test_a_value_knows_its_key_in_the_file() -> None:
    assert parse_properties(b"option.dtype=fp16").values["option.dtype"].source == "serving.properties: option.dtype"


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"a=1\nb=\\u12\n", 2),
        (b"a=\\\n1\n\nb=C:\\users", 4),
        (b"a=\\ud800", 1),
        (b"#\n#\na=\\u0000", 3),
        (b"a\\nb=1", 1),
    ],
)
def test_a_broken_entry_is_named_by_its_line(data: bytes, line: int) -> None:
    (problem,) = parse_properties(data).problems
    assert problem.startswith(f"serving.properties, line {line}: ")


def test_every_broken_entry_is_named_and_the_others_are_read() -> None:
    file = parse_properties(b"a=\\u1\nb=2\nc=\\uzzzz\nd=4")
    assert len(file.problems) == 2
    assert texts(dict(file.values)) == {"b": "2", "d": "4"}


def test_a_key_that_occurs_twice_is_warned_of() -> None:
    assert parse_properties(b"a=1\nb=2\na=3").warnings == (
        "serving.properties, line 3: a is in line 1 already; the last value counts",
    )
    assert parse_properties(b"a=1\na=1").warnings == ()


def test_a_file_in_utf_8_is_warned_of() -> None:
    (warning,) = parse_properties("a=é".encode()).warnings
    assert "ISO-8859-1" in warning


def test_a_byte_order_mark_is_no_part_of_the_first_key() -> None:
    file = parse_properties(b"\xef\xbb\xbfoption.model_id=org/x\r\nb=2")
    assert {key: value.text for key, value in file.values.items()} == {"option.model_id": "org/x", "b": "2"}
    (warning,) = file.warnings
    assert "byte order mark" in warning


def test_a_missing_file_is_empty_and_an_unreadable_one_a_problem(tmp_path: Path) -> None:
    assert read_properties(tmp_path / "serving.properties").values == {}
    (tmp_path / "serving.properties").mkdir()
    (problem,) = read_properties(tmp_path / "serving.properties").problems
    assert problem.startswith("serving.properties cannot be read: ")


@given(st.binary())
def test_any_bytes_give_values_or_problems(data: bytes) -> None:
    file = parse_properties(data)
    try:
        expected = javaproperties.loads(data)
    except javaproperties.InvalidUEscapeError:
        assert file.problems
        return
    assert file.problems or texts(dict(file.values)) == expected


@given(st.dictionaries(st.text("abc.=: \\é#", min_size=1), st.text("xyz =:\\\n\té中"), max_size=5))
def test_what_java_would_write_is_read_back(values: dict[str, str]) -> None:
    assert texts(dict(parse_properties(javaproperties.dumps(values).encode("ascii")).values)) == values


@pytest.mark.parametrize(
    ("variable", "text", "key", "expected"),
    [
        ("OPTION_DTYPE", "fp16", "option.dtype", "fp16"),
        ("OPTION_MAX_MODEL_LEN", "1", "option.max_model_len", "1"),
        ("OPTION_modelName", "m", "option.modelName", "m"),
        ("OPTION_ENTRYPOINT", "model.py", "option.entryPoint", "model.py"),
        ("OPTION_ENGINE", "Python", "engine", "Python"),
        ("ARGS_BATCH_SIZE", "2", "batch_size", "2"),
        ("ARGS_minWorkers", "2", "minWorkers", "2"),
        ("HF_MODEL_QUANTIZE", "awq", "option.quantize", "awq"),
        ("HF_MODEL_TRUST_REMOTE_CODE", "true", "option.trust_remote_code", "true"),
        ("MAX_BATCH_PREFILL_TOKENS", "4096", "option.max_rolling_batch_prefill_tokens", "4096"),
        ("MAX_BATCH_SIZE", "16", "option.max_rolling_batch_size", "16"),
        ("ENABLE_CUDA_GRAPHS", "true", "option.enforce_eager", "false"),
        ("ENABLE_CUDA_GRAPHS", "no", "option.enforce_eager", "true"),
        ("CUDA_MEMORY_FRACTION", "0.8", "option.gpu_memory_utilization", "0.8"),
    ],
)
def test_a_variable_sets_a_key_of_the_model(variable: str, text: str, key: str, expected: str) -> None:
    layer = option_layer(read_environment({variable: text}, []), [])
    assert layer == {key: Value(expected, f"environment: {variable}")}


def test_an_empty_variable_counts_as_unset() -> None:
    variables = read_environment({"OPTION_QUANTIZE": "", "HF_MODEL_QUANTIZE": "awq", "OPTION_DTYPE": ""}, [])
    assert texts(option_layer(variables, [])) == {"option.quantize": "awq"}


def test_a_translation_does_not_overwrite() -> None:
    variables = read_environment({"OPTION_QUANTIZE": "gptq", "HF_MODEL_QUANTIZE": "awq", "SM_NUM_GPUS": "2"}, [])
    assert texts(option_layer(variables, [])) == {"option.quantize": "gptq"}
    assert variables["TENSOR_PARALLEL_DEGREE"] == Value("2", "environment: SM_NUM_GPUS")


def test_server_keys_are_lower_cased() -> None:
    variables = read_environment({"SERVING_Job_Queue_SIZE": "5", "MAX_CONCURRENT_REQUESTS": "7", "SERVING_": "x"}, [])
    problems: list[str] = []
    layer = serving_layer(variables, problems)
    assert layer["job_queue_size"].text == "5"
    assert "job_queue_size is set twice" in problems[0]


def test_two_spellings_of_a_variable_must_agree() -> None:
    problems: list[str] = []
    option_layer(read_environment({"OPTION_DTYPE": "fp16", "OPTION_dtype": "fp16"}, []), problems)
    assert problems == []
    option_layer(read_environment({"OPTION_DTYPE": "fp16", "OPTION_dtype": "bf16"}, []), problems)
    assert "OPTION_DTYPE" in problems[0]
    assert "OPTION_dtype" in problems[0]


def test_a_variable_that_is_no_text_is_a_problem_only_if_it_matters() -> None:
    problems: list[str] = []
    assert read_environment({"OPTION_DTYPE": "\udcff", "OTHER": "\udcff"}, problems) == {}
    assert problems == ["environment: OPTION_DTYPE is not UTF-8 text"]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"SAGEMAKER_MAX_PAYLOAD_IN_MB": "6"}, {"max_request_size": str(6 * 1024 * 1024)}),
        ({"SAGEMAKER_MAX_PAYLOAD_IN_MB": "6", "SAGEMAKER_MAX_REQUEST_SIZE": "99"}, {"max_request_size": "99"}),
        ({"SAGEMAKER_MAX_PAYLOAD_IN_MB": "0"}, {"max_request_size": str(2**63 - 1)}),
        ({"SAGEMAKER_BIND_TO_PORT": "9090"}, {"port": "9090"}),
    ],
)
def test_sagemaker_sets_keys_of_the_server(environ: dict[str, str], expected: dict[str, str]) -> None:
    assert texts(sagemaker_server_layer(read_environment(environ, []), [])) == expected


@pytest.mark.parametrize("text", ["-1", "six", "1.5", "99999999999"])
def test_a_payload_that_is_no_number_of_mebibytes_is_a_problem(text: str) -> None:
    problems: list[str] = []
    sagemaker_server_layer(read_environment({"SAGEMAKER_MAX_PAYLOAD_IN_MB": text}, []), problems)
    assert "environment: SAGEMAKER_MAX_PAYLOAD_IN_MB" in problems[0]


def test_sagemaker_overwrites_keys_of_the_model() -> None:
    variables = read_environment(
        {
            "SAGEMAKER_STARTUP_TIMEOUT": "60",
            "SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS": "30",
            "SAGEMAKER_NUM_MODEL_WORKERS": "2",
        },
        [],
    )
    assert texts(sagemaker_model_layer(variables)) == {
        "option.model_loading_timeout": "60",
        "option.predict_timeout": "30",
        "minWorkers": "2",
        "maxWorkers": "2",
    }


@given(st.dictionaries(st.sampled_from(["OPTION_A", "OPTION_a", "SERVING_B", "ARGS_C", "OPTION_", "X"]), st.text()))
def test_any_environment_is_read(environ: dict[str, str]) -> None:
    problems: list[str] = []
    variables = read_environment(environ, problems)
    option_layer(variables, problems)
    serving_layer(variables, problems)
    sagemaker_server_layer(variables, problems)
