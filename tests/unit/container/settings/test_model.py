"""Which code of a model directory serves the model, and with which settings."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from container.settings import environment
from container.settings.report import render_text
from container.settings.settings import Settings, SettingsError
from handlers.custom.settings import HandlerConfig
from tests.settings import load_settings

SCRIPT = "def model_fn(model_dir): ...\n"
HANDLER = "def handle(inputs):\n    return None\n"
FORMATTER = "from djl_python.output_formatter import output_formatter\n"


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "my_llm"
    directory.mkdir()
    return directory


def load(
    directory: Path, code: str | None = None, properties: str = "", environ: Mapping[str, str] | None = None
) -> Settings:
    if code is not None:
        (directory / "model.py").write_text(code)
    (directory / "serving.properties").write_text(properties)
    return load_settings(directory, environ or {})


def handler(
    directory: Path, code: str | None = HANDLER, properties: str = "", environ: Mapping[str, str] | None = None
) -> HandlerConfig:
    found = load(directory, code, properties, environ).model.handler
    assert found is not None
    return found


@pytest.mark.parametrize(
    "code",
    [
        HANDLER,
        "async def handle(inputs): ...",
        "from service import handle",
        "import service as handle",
        "handle = Service().handle",
        "first, handle = make()",
        "handle: object = make()",
        "from service import *",
        "try:\n    from fast import handle\nexcept ImportError:\n    def handle(inputs): ...",
        "if True:\n    def handle(inputs): ...",
        "def broken(:",
        "for handle in (len, print): pass",
        "while True:\n    def handle(inputs): ...\n    break",
        "match 1:\n    case handle: pass",
        "if (handle := make()): pass",
        "globals()['handle'] = make()",
        "exec('def handle(inputs): ...')",
        "def setup():\n    global handle\n    handle = make()\nsetup()",
        "with open('x') as handle: pass",
    ],
)
def test_a_model_py_that_defines_handle_serves_the_model(model_dir: Path, code: str) -> None:
    assert handler(model_dir, code, "option.model_id=org/name").entry_point == str(model_dir / "model.py")


@pytest.mark.parametrize("code", [FORMATTER, "def other(): ...", "class A:\n    def handle(self): ...", ""])
def test_without_handle_an_engine_serves_and_model_py_may_have_formatters(model_dir: Path, code: str) -> None:
    model = load(model_dir, code, "option.model_id=org/name").model
    assert model.handler is None
    assert model.formatters == model_dir / "model.py"


def test_without_handle_and_without_a_model_the_handler_is_missed_when_it_is_loaded(model_dir: Path) -> None:
    assert handler(model_dir, "x = 1").entry_point == str(model_dir / "model.py")


def test_the_file_may_have_the_name_of_its_directory(model_dir: Path) -> None:
    (model_dir / "my_llm.py").write_text(HANDLER)
    assert handler(model_dir, None).entry_point == str(model_dir / "my_llm.py")


def test_the_entry_point_may_be_another_file_or_a_module(model_dir: Path) -> None:
    (model_dir / "other.py").write_text(HANDLER)
    assert handler(model_dir, HANDLER, "option.entryPoint=other.py").entry_point == str(model_dir / "other.py")
    assert handler(model_dir, HANDLER, "option.entryPoint=package.module").entry_point == "package.module"
    assert handler(model_dir, HANDLER, "", {"OPTION_ENTRYPOINT": "other.py"}).entry_point == str(model_dir / "other.py")
    assert handler(model_dir, HANDLER, "", {"DJL_ENTRY_POINT": "other.py"}).entry_point == str(model_dir / "other.py")


@pytest.mark.parametrize("text", ["missing.py", "not a module", "a..b"])
def test_an_entry_point_must_name_something(model_dir: Path, text: str) -> None:
    with pytest.raises(SettingsError, match=r"option\.entryPoint is"):
        load(model_dir, HANDLER, f"option.entryPoint={text}")


def test_lmis_own_handler_goes_before_model_py(model_dir: Path) -> None:
    model = load(model_dir, HANDLER, "option.entryPoint=djl_python.huggingface\noption.model_id=org/name").model
    assert model.handler is None
    assert model.formatters == model_dir / "model.py"


@pytest.mark.parametrize("place", ["model.py", "inference.py", "code/inference.py", "code/serve.py"])
def test_a_script_with_model_fn_is_the_handler_where_sagemaker_has_it(model_dir: Path, place: str) -> None:
    path = model_dir / place
    path.parent.mkdir(exist_ok=True)
    path.write_text(SCRIPT)
    environ = {"SAGEMAKER_PROGRAM": path.name} if path.name == "serve.py" else {}
    assert handler(model_dir, None, "", environ).entry_point == str(path)
    given = "option.entryPoint=djl_python.sagemaker\noption.model_id=org/name"
    assert handler(model_dir, None, given, environ).entry_point == str(path)
    assert handler(model_dir, None, f"option.entryPoint={place}", environ).entry_point == str(path)


def test_a_script_beside_a_model_of_an_engine_is_used_where_it_is_model_py_or_asked_for(model_dir: Path) -> None:
    assert handler(model_dir, SCRIPT, "option.model_id=org/name").entry_point == str(model_dir / "model.py")
    (model_dir / "model.py").unlink()
    (model_dir / "code").mkdir()
    (model_dir / "code" / "inference.py").write_text(SCRIPT)
    found = load(model_dir, None, "option.model_id=org/name")
    assert found.model.handler is None
    assert "code/inference.py is not used: option.entryPoint=djl_python.sagemaker would serve it" in found.warnings


def test_a_script_has_no_rolling_batch(model_dir: Path) -> None:
    found = load(model_dir, SCRIPT, "option.rolling_batch=auto")
    assert found.model.handler is not None
    assert not found.model.handler.rolling_batch
    assert any("model.py has model_fn and no `handle`" in warning for warning in found.warnings)
    assert handler(model_dir, HANDLER, "option.rolling_batch=auto").rolling_batch


def test_a_script_has_to_be_there(model_dir: Path) -> None:
    with pytest.raises(SettingsError, match="model_fn"):
        load(model_dir, FORMATTER, "option.entryPoint=djl_python.sagemaker")


@pytest.mark.parametrize("name", ["sklearn_handler", "xgboost_handler"])
def test_lmis_handlers_of_predictive_models_are_refused_with_what_serves_such_a_model(
    model_dir: Path, name: str
) -> None:
    with pytest.raises(SettingsError, match=r"option\.entryPoint=djl_python\.sagemaker"):
        load(model_dir, SCRIPT, f"option.entryPoint=djl_python.{name}")


def test_another_function_may_be_the_handler(model_dir: Path) -> None:
    found = handler(model_dir, "def infer(inputs): ...", "option.handler=infer\noption.model_id=org/name")
    assert found.function == "infer"


def test_a_handler_needs_no_model(model_dir: Path) -> None:
    model = load(model_dir, HANDLER).model
    assert (model.name, model.model_id) == ("my_llm", str(model_dir))


def test_the_handler_sees_the_settings_as_they_were_written(model_dir: Path) -> None:
    (model_dir / "weights").mkdir()
    properties = handler(
        model_dir,
        HANDLER,
        "engine=Python\noption.model_id=weights\noption.dtype=int8\noption.mine=a b\nbatch_size=4",
        {"OPTION_MORE": "1", "TENSOR_PARALLEL_DEGREE": "2"},
    ).properties
    assert properties == {
        "engine": "Python",
        "model_id": str(model_dir / "weights"),
        "dtype": "int8",
        "mine": "a b",
        "batch_size": "4",
        "more": "1",
        "tensor_parallel_degree": "2",
    }


@pytest.mark.parametrize("text", ["/not/here", "https://example.com/weights", "registry:my model", "djl://x"])
def test_what_a_model_id_means_is_the_handlers_business(model_dir: Path, text: str) -> None:
    assert handler(model_dir, HANDLER, f"option.model_id={text}").properties["model_id"] == text


def test_settings_of_the_workers_reach_their_fields(model_dir: Path) -> None:
    found = handler(
        model_dir,
        HANDLER,
        "minWorkers=2\nmaxWorkers=3\nmax_idle_time=5\nretry_threshold=4\noption.async_mode=true\n"
        f"option.pythonExecutable={sys.executable}\noption.env=A=1,B=x,y=2,z\noption.enable_venv=true",
        {"DJL_OFFLINE": "true"},
    )
    assert (found.min_workers, found.max_workers, found.max_idle_time, found.retry_threshold) == (2, 3, 5.0, 4)
    assert (found.async_mode, found.enable_venv, found.packages.offline) == (True, True, True)
    assert found.python_executable == sys.executable
    assert found.environment == {"A": "1", "B": "x", "y": "2,z"}


def test_workers_may_end_as_soon_as_they_are_idle(model_dir: Path) -> None:
    assert 0 < handler(model_dir, HANDLER, "max_idle_time=0").max_idle_time < 0.1


def test_a_handler_gets_empty_values_which_count_as_unset(model_dir: Path) -> None:
    found = handler(model_dir, HANDLER, "option.quantize=\noption.mine=\noption.rolling_batch=\noption.env=")
    assert {name: found.properties[name] for name in ("quantize", "mine")} == {"quantize": "", "mine": ""}
    assert (found.rolling_batch, found.environment, "env" in found.properties) == (False, {}, False)


@pytest.mark.parametrize("url", ["https://example.com/model.py", "s3://bucket/model.py", "HTTP://example.com/x"])
def test_an_entry_point_is_not_downloaded(model_dir: Path, url: str) -> None:
    with pytest.raises(SettingsError):
        load(model_dir, None, f"option.entryPoint={url}")


@pytest.mark.parametrize(
    ("properties", "environ", "workers"),
    [
        ("", {}, (1, 1)),
        ("minWorkers=3", {}, (3, 3)),
        ("min_workers=2\nmax_workers=4", {}, (2, 4)),
        ("minWorkers=0", {}, (0, 1)),
        ("minWorkers=0\nmaxWorkers=0", {}, (0, 0)),
        ("minWorkers=3\nmaxWorkers=2", {}, (3, 3)),
        ("minWorkers=1\ncpu.minWorkers=2\ngpu.minWorkers=4", {}, (2, 2)),
        ("", {"SERVING_MIN_WORKERS": "2", "SERVING_MAX_WORKERS": "5"}, (2, 5)),
        ("minWorkers=1\nmaxWorkers=1", {"SAGEMAKER_NUM_MODEL_WORKERS": "4"}, (4, 4)),
    ],
)
def test_the_number_of_workers(
    model_dir: Path, properties: str, environ: dict[str, str], workers: tuple[int, int]
) -> None:
    found = handler(model_dir, HANDLER, properties, environ)
    assert (found.min_workers, found.max_workers) == workers


def test_auto_means_no_rolling_batch_where_there_is_a_model(model_dir: Path) -> None:
    found = handler(model_dir, HANDLER, "option.rolling_batch=auto\noption.model_id=org/name")
    assert (found.rolling_batch, found.properties["rolling_batch"]) == (False, "disable")
    assert handler(model_dir, HANDLER, "option.rolling_batch=auto\noption.model_id=https://h/weights").rolling_batch
    (model_dir / "config.json").touch()
    assert handler(model_dir, HANDLER, "option.rolling_batch=auto").rolling_batch is False
    assert handler(model_dir, HANDLER, "option.rolling_batch=vllm").rolling_batch is True


@pytest.mark.parametrize(
    ("properties", "size"), [("", 32), ("option.max_rolling_batch_size=3", 3), ("option.max_num_seqs=4", 4)]
)
def test_a_handlers_rolling_batch_is_bounded(model_dir: Path, properties: str, size: int) -> None:
    assert load(model_dir, HANDLER, properties).model.max_rolling_batch_size == size


@pytest.mark.parametrize(("text", "rolling"), [("auto", True), ("vllm", True), ("disable", False)])
def test_a_handler_with_a_rolling_batch_gets_all_active_requests(model_dir: Path, text: str, rolling: bool) -> None:
    assert handler(model_dir, HANDLER, f"option.rolling_batch={text}").rolling_batch is rolling


def test_a_handler_may_have_failures_forgiven(model_dir: Path) -> None:
    found = handler(model_dir, HANDLER, "", {"SERVING_HEALTH_CHECK_OVERRIDE": "true"})
    assert found.retry_threshold == sys.maxsize


@pytest.mark.parametrize(
    "properties",
    ["minWorkers=-1", "option.env=no", "option.pythonExecutable=/no/such/python", "option.handler=a b", "batch_size=x"],
)
def test_a_wrong_setting_of_a_handler_is_a_problem(model_dir: Path, properties: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load(model_dir, HANDLER, properties)
    assert properties.partition("=")[0] in caught.value.problems[0]


def test_secrets_in_the_workers_environment_are_not_shown(model_dir: Path) -> None:
    settings = load(model_dir, HANDLER, "option.env=TOKEN=secret-1")
    assert "option.env" in render_text(settings)
    assert "secret-1" not in render_text(settings)
    assert settings.model.handler is not None
    assert "env" not in settings.model.handler.properties, "handlers print their properties"


def test_a_formatter_may_be_named(model_dir: Path) -> None:
    model = load(model_dir, FORMATTER, "option.model_id=org/name\noption.output_formatter=mine").model
    assert (model.lmi.output_formatter, model.lmi.formatter_function) == (None, "mine")
    with pytest.raises(SettingsError, match=r"model\.py"):
        load(model_dir.parent, None, "option.model_id=org/name\noption.output_formatter=mine")


def test_workers_are_counted_for_each_gpu(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "gpu_count", lambda: 4)
    found = handler(model_dir, HANDLER, "minWorkers=1\nmaxWorkers=2\ngpu.maxWorkers=3")
    assert (found.devices, found.min_workers, found.max_workers) == (("0", "1", "2", "3"), 4, 12)
    parallel = handler(model_dir, HANDLER, "option.tensor_parallel_degree=2")
    assert (parallel.devices, parallel.min_workers) == (("0,1", "2,3"), 2)
    assert handler(model_dir, HANDLER, "option.tensor_parallel_degree=max").devices == ("0,1,2,3",)
    assert handler(model_dir, HANDLER, "load_on_devices=cpu").devices == ()
    with pytest.raises(SettingsError, match="device 7"):
        load(model_dir, HANDLER, "load_on_devices=7")


def test_a_handler_of_a_hugging_face_model_has_all_gpus_and_lmis_properties(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "gpu_count", lambda: 4)
    named = "option.model_id=org/name\n"
    found = handler(model_dir, HANDLER, named)
    assert (found.devices, found.min_workers, found.sees_own_gpus) == (("0,1,2,3",), 1, True)
    lmi = {"tensor_parallel_degree": "4", "pipeline_parallel_degree": "1", "max_rolling_batch_size": "32"}
    assert lmi.items() <= found.properties.items()
    assert (found.properties["rolling_batch"], found.rolling_batch) == ("disable", False)
    single = handler(model_dir, HANDLER, f"{named}option.tensor_parallel_degree=1\noption.rolling_batch=lmi-dist")
    assert (single.devices, single.sees_own_gpus, single.rolling_batch) == (("0", "1", "2", "3"), True, True)
    assert handler(model_dir, HANDLER, f"{named}load_on_devices=1;3").devices == ("1,3",)
    monkeypatch.setattr(environment, "gpu_count", lambda: 0)
    assert "tensor_parallel_degree" not in handler(model_dir, HANDLER, named).properties


@pytest.mark.parametrize(("gpus", "degree"), [(4, "4"), (0, "1")])
def test_a_handler_gets_the_largest_degree_as_a_number(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, degree: str
) -> None:
    monkeypatch.setattr(environment, "gpu_count", lambda: gpus)
    found = handler(model_dir, HANDLER, "option.tensor_parallel_degree=max")
    assert found.properties["tensor_parallel_degree"] == degree
    found = handler(model_dir, HANDLER, "", {"TENSOR_PARALLEL_DEGREE": "max", "PIPELINE_PARALLEL_DEGREE": "2"})
    assert found.properties["tensor_parallel_degree"] == str(max(gpus // 2, 1))


def test_a_handler_that_asks_for_mpi_is_told_that_it_has_one_process(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "gpu_count", lambda: 2)
    (warning,) = load(model_dir, HANDLER, "engine=MPI\noption.tensor_parallel_degree=2").warnings
    assert "MPI is not used" in warning
    assert not load(model_dir, HANDLER, "engine=MPI\noption.tensor_parallel_degree=1").warnings


def test_a_handler_of_pipelines_is_told_the_task(model_dir: Path) -> None:
    code = "from djl_python.huggingface import handle\n"
    (model_dir / "model.py").write_text(code)
    found = load_settings(model_dir, {"HF_TASK": "fill-mask", "HF_MODEL_ID": "org/name"}).model.handler
    assert found is not None
    assert found.properties["task"] == "fill-mask"


def test_option_model_is_a_property_of_a_handlers_own(model_dir: Path) -> None:
    found = handler(model_dir, HANDLER, "option.model=small\noption.model_id=org/name")
    assert (found.properties["model"], found.properties["model_id"]) == ("small", "org/name")


@pytest.mark.parametrize("name", ["code/model.py", "code/handler.py"])
def test_an_entry_point_may_name_the_only_directory(tmp_path: Path, name: str) -> None:
    code = tmp_path / "model" / "code"
    code.mkdir(parents=True)
    (code / "model.py").write_text(HANDLER)
    (code / "handler.py").write_text(HANDLER)
    settings = load_settings(tmp_path / "model", {"DJL_ENTRY_POINT": name})
    assert settings.model.handler is not None
    assert settings.model.handler.entry_point == str(tmp_path / "model" / name)
    with pytest.raises(SettingsError, match=str(code)):
        load_settings(tmp_path / "model", {"DJL_ENTRY_POINT": "code/other.py"})


@pytest.mark.parametrize("program", ["serve.py", "serve"])
def test_sagemaker_program_is_a_file_or_the_name_of_a_module(model_dir: Path, program: str) -> None:
    (model_dir / "code").mkdir()
    (model_dir / "code" / "serve.py").write_text(SCRIPT)
    found = handler(model_dir, None, "", {"SAGEMAKER_PROGRAM": program})
    assert found.entry_point == str(model_dir / "code" / "serve.py")


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (b"{", "not JSON in UTF-8"),
        (b"", "not JSON in UTF-8"),
        (b"[]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b'{"a": "\xff"}', "not JSON in UTF-8"),
        (b"\xef\xbb\xbf{}", "not JSON in UTF-8"),
        (b"[" * 100_000, "not JSON in UTF-8"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON in UTF-8"),
    ],
)
def test_a_broken_config_json_is_a_problem(model_dir: Path, tmp_path: Path, config: bytes, why: str) -> None:
    (model_dir / "config.json").write_bytes(config)
    with pytest.raises(SettingsError, match=f"model directory .*{why}"):
        load_settings(model_dir, {})
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(SettingsError, match=f"HF_MODEL_ID.*{why}"):
        load_settings(other, {"HF_MODEL_ID": str(model_dir)})
    assert load_settings(model_dir, {"OPTION_HF_CONFIG_PATH": "org/name"}).model.model_id == str(model_dir)
    assert handler(model_dir).entry_point == str(model_dir / "model.py")


def test_a_directory_without_a_model_is_refused_before_the_engine_starts(model_dir: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / ("1" * 40)
    snapshot.mkdir(parents=True)
    (tmp_path / "hub" / "models--org--name" / "refs").mkdir()
    for place, why in {
        tmp_path / "hub": "root of the hub's cache",
        tmp_path / "hub" / "models--org--name": "in the hub's cache",
        snapshot: r"it has no config\.json",
    }.items():
        for environ in ({"HF_MODEL_ID": str(place)}, {"OPTION_MODEL_ID": str(place)}):
            with pytest.raises(SettingsError, match=why):
                load_settings(model_dir, environ)
    for variable in ("OPTION_SPECULATIVE_DRAFT_MODEL", "OPTION_SPECULATIVE_MODEL"):
        with pytest.raises(SettingsError, match=r"config\.json"):
            load_settings(model_dir, {"HF_MODEL_ID": "org/name", variable: str(snapshot)})
    (snapshot / "config.json").write_text("{}")
    assert load_settings(model_dir, {"HF_MODEL_ID": str(snapshot)}).model.model_id == str(snapshot)
    for name in ("params.json", "model.GGUF"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
        assert load_settings(model_dir, {"OPTION_MODEL_ID": str(tmp_path / name)}).warnings == ()
