"""The models that a server loads at its start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from container.models.placement import GpuPlan
from container.settings.load import further_settings as read_further
from container.settings.load import load_startup
from container.settings.report import startup_json, startup_text
from container.settings.settings import SettingsError, Startup, UrlNotFound
from container.settings.values import Value
from container.sources import location as model_location
from tests.settings import further_settings


def model(directory: Path, properties: str = "", *, config: bool = True) -> Path:
    directory.mkdir(parents=True)
    if config:
        (directory / "config.json").write_text("{}")
    if properties or not config:
        (directory / "serving.properties").write_text(properties)
    return directory


def names(startup: Startup) -> list[str]:
    return [one.title for one in startup.models]


def problem(model_dir: Path | None, environ: dict[str, str], **line: str) -> str:
    with pytest.raises(SettingsError) as caught:
        load_startup(model_dir, environ, line)
    return str(caught.value)


def test_an_empty_model_id_leaves_the_choice_to_the_environment(tmp_path: Path) -> None:
    directory = model(tmp_path / "m", "option.model_id=", config=False)
    (found,) = load_startup(directory, {"HF_MODEL_ID": "org/name"}, {}).models
    assert found.settings.config.model_id == "org/name"


def test_one_model_is_read_as_ever(tmp_path: Path) -> None:
    startup = load_startup(model(tmp_path / "m"), {"HF_MODEL_ID": str(tmp_path / "m")}, {"model_name": "x"})
    assert names(startup) == ["x"]
    assert startup_text(startup, GpuPlan(())).splitlines()[0].startswith("setting")


def test_each_directory_of_a_store_is_a_model_with_its_own_file_and_the_same_environment(tmp_path: Path) -> None:
    model(tmp_path / "b-1", "option.dtype=fp16\njob_queue_size=7")
    model(tmp_path / "a", "option.dtype=fp32")
    (tmp_path / "empty").mkdir()
    (tmp_path / ".hidden").mkdir()
    startup = load_startup(tmp_path, {"OPTION_MAX_MODEL_LEN": "64", "SERVING_JOB_QUEUE_SIZE": "9"}, {"port": "90"})
    assert names(startup) == ["a", "b_1"]
    settings = [one.settings for one in startup.models]
    assert [one.config.dtype for one in settings] == ["float32", "float16"]
    assert [one.config.engine_arguments for one in settings] == [{"max_model_len": "64"}] * 2
    assert [one.server_config.job_queue_size for one in settings] == [9, 7]
    assert (startup.server_config.job_queue_size, startup.server_config.port) == (9, 90)
    report = json.loads(startup_json(startup, GpuPlan(())))
    assert report["models"].keys() == {"a", "b_1"}
    assert "model b_1 (" in startup_text(startup, GpuPlan(()))


def test_the_environments_names_belong_to_a_single_model(tmp_path: Path) -> None:
    model(tmp_path / "a")
    environ = {"OPTION_SERVED_MODEL_NAME": "x,y"}
    (alone,) = load_startup(tmp_path, environ, {}).models
    assert alone.settings.config.public_names == ("x", "y")
    model(tmp_path / "b", "option.served_model_name=z")
    several = load_startup(tmp_path, environ, {}).models
    assert [one.settings.config.public_names for one in several] == [("a",), ("z",)]


def test_a_name_belongs_to_one_model(tmp_path: Path) -> None:
    for name in ("a", "b"):
        model(tmp_path / name)
    assert "there are several models (a, b)" in problem(tmp_path, {}, model_name="x")
    model(tmp_path / "c-1")
    model(tmp_path / "c_1")
    assert "two models are called c_1" in problem(tmp_path, {})


def test_a_list_has_names_versions_engines_and_urls(tmp_path: Path) -> None:
    a, b = model(tmp_path / "a"), model(tmp_path / "b")
    listed = f"one={a} [two:2]={b},{b}, [three:1:Python:*]=file://{a}"
    assert names(load_startup(None, {"SERVING_LOAD_MODELS": listed}, {})) == ["one", "two:2", "b", "three:1"]
    assert "there is no such directory" in problem(None, {"SERVING_LOAD_MODELS": "x=/no/such"})
    assert "there is no such directory" in problem(None, {"SERVING_LOAD_MODELS": f"x=/{'a' * 300}"}), "too long a name"
    assert "engine" in problem(None, {"SERVING_LOAD_MODELS": f"x:1:TensorFlow={a}"})
    run = model(tmp_path / "run=5" / "m")
    assert names(load_startup(None, {"SERVING_LOAD_MODELS": f"file://{run}"}, {})) == ["m"]


@pytest.mark.parametrize("text", ["{}, ", ",{}", "\n{},,"])
def test_a_list_may_have_empty_entries(tmp_path: Path, text: str) -> None:
    directory = model(tmp_path / "m")
    assert names(load_startup(None, {"SERVING_LOAD_MODELS": text.format(directory)}, {})) == ["m"]


def test_the_command_lines_directory_goes_before_a_list(tmp_path: Path) -> None:
    startup = load_startup(model(tmp_path / "a"), {"SERVING_LOAD_MODELS": "x=/no/such"}, {})
    assert names(startup) == ["a"]


def test_no_models_but_those_that_are_loaded_later(tmp_path: Path) -> None:
    assert load_startup(None, {"SERVING_LOAD_MODELS": "none"}, {}).models == ()
    environ = {"SAGEMAKER_MULTI_MODEL": "true", "HF_MODEL_ID": "a/b", "DJL_OFFLINE": "true", "HF_API_TOKEN": "hf_x"}
    startup = load_startup(tmp_path, environ, {"port": "90"})
    assert startup.exports == {"HF_HUB_OFFLINE": "1", "HF_TOKEN": "hf_x"}
    assert (startup.models, startup.server_config.multi_model, startup.server_config.port) == ((), True, 90)
    assert "fail_fast" in problem(None, {"SAGEMAKER_MULTI_MODEL": "true", "SERVING_FAIL_FAST": "maybe"})


def test_a_hub_id_beside_a_model_directory_is_a_second_model(tmp_path: Path) -> None:
    own = model(tmp_path / "m", "option.dtype=fp16")
    startup = load_startup(own, {"HF_MODEL_ID": "org/My-Model", "HF_REVISION": "r"}, {"model_name": "mine"})
    assert names(startup) == ["mine", "org_My_Model"]
    mine, hub = (one.settings.config for one in startup.models)
    assert (mine.model_id, mine.revision, mine.dtype) == (str(own), None, "float16")
    assert (hub.model_id, hub.revision, hub.dtype) == ("org/My-Model", "r", "auto")
    local = load_startup(own, {"HF_MODEL_ID": str(model(tmp_path / "other"))}, {})
    assert names(local) == ["m", "other"]


@pytest.mark.parametrize("variable", ["HF_MODEL_ID", "MODEL_ID", "SM_VLLM_MODEL"])
def test_a_hub_id_under_any_containers_name_is_the_model_of_no_directory(tmp_path: Path, variable: str) -> None:
    directories = [str(model(tmp_path / name)) for name in ("a", "b")]
    startup = load_startup(tmp_path, {variable: "org/x", "REVISION": "r"}, {})
    assert names(startup) == ["a", "b", "org_x"]
    models = [one.settings.config for one in startup.models]
    assert [(one.model_id, one.revision) for one in models] == [*((each, None) for each in directories), ("org/x", "r")]


@pytest.mark.parametrize("properties", ["option.dtype=fp16", "option.model_id=org/x"])
def test_a_hub_id_is_the_model_of_a_directory_that_has_none_or_the_same(tmp_path: Path, properties: str) -> None:
    directory = model(tmp_path / "m", properties, config=False)
    startup = load_startup(directory, {"HF_MODEL_ID": "org/x"}, {})
    assert [one.settings.config.model_id for one in startup.models] == ["org/x"]


def test_what_is_wrong_with_one_of_several_stops_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model(tmp_path / "a")
    model(tmp_path / "b", "option.dtype=float12")
    assert "float12" in problem(tmp_path, {})
    monkeypatch.setattr(model_location, "DEFAULT_MODEL_DIR", tmp_path / "nothing")
    assert "there is no model" in problem(None, {})


@pytest.mark.parametrize("url", ["http://h/x", "relative/x", "file://host/x", "/no/such", "", "/a\0b"])
def test_a_url_is_a_directory_of_this_machine(url: str) -> None:
    with pytest.raises(UrlNotFound):
        further_settings(Value(url, "here"), "a", {})


def test_a_file_url_may_have_escapes(tmp_path: Path) -> None:
    directory = model(tmp_path / "a b")
    for url in (f"file://{tmp_path}/a%20b", f"{tmp_path}/a b/"):
        assert further_settings(Value(url, "here"), "a", {}).config.model_dir == directory


@pytest.mark.parametrize("variable", ["HF_MODEL_ID", "SM_VLLM_MODEL"])
def test_the_store_itself_is_no_further_model(tmp_path: Path, variable: str) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    model(one / "archived")
    startup = load_startup(one, {variable: f"{one}/"}, {})
    assert names(startup) == ["archived"]
    assert startup.models[0].settings.config.model_id == str(one / "archived")
    model(two / "a")
    model(two / "b")
    assert names(load_startup(two, {variable: str(two)}, {})) == ["a", "b"]


FITTING = None  # As many copies as the GPUs hold.


def copies(place: Path | None, environ: dict[str, str]) -> list[int | None]:
    return [one.settings.config.max_copies for one in load_startup(place, environ, {}, gpus=4).models]


def test_a_servers_only_model_takes_the_machine_however_it_is_named(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    one, other = tmp_path / "a", tmp_path / "b"
    assert copies(one, {}) == [FITTING]
    assert copies(one, {"HF_MODEL_ID": str(one)}) == [FITTING]
    assert copies(one, {"HF_MODEL_ID": "org/name"}) == [1, 1]
    assert copies(tmp_path, {}) == [1, 1]
    assert copies(tmp_path, {"SERVING_MAX_WORKERS": "2"}) == [2, 2]
    assert copies(None, {"SERVING_LOAD_MODELS": f"m={one}"}) == [FITTING]
    assert copies(None, {"SERVING_LOAD_MODELS": f"m={one},n={other}"}) == [1, 1]
    assert copies(None, {"SERVING_LOAD_MODELS": f"m={one}", "HF_MODEL_ID": "org/name"}) == [1, 1]
    assert copies(None, {"SERVING_LOAD_MODELS": "NONE", "HF_MODEL_ID": "org/name"}) == [FITTING]
    assert copies(None, {"SERVING_LOAD_MODELS": "NONE", "HF_MODEL_ID": str(one)}) == [FITTING]


def test_models_that_are_registered_later_have_one_copy_unless_they_name_a_number(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    started, url = load_startup(tmp_path, {}, {}, gpus=4), Value(str(tmp_path), "POST /models: url")

    def registered(**numbers: str) -> int | None:
        arguments = {key: Value(number, "POST /models") for key, number in numbers.items()}
        return read_further(url, "m", started.environment, {}, arguments).config.max_copies

    assert registered() == 1
    assert registered(maxWorkers="3") == 3
    assert registered(minWorkers="2") == 2
