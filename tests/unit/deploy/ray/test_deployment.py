"""The options that Serve gets: replicas, resources, and the time to stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from container.settings.load import load_startup
from container.settings.settings import SettingsError
from tests.live.server import write_model

pytest.importorskip("ray.serve", reason="Ray is not installed")

import ray

from deploy.ray import application
from deploy.ray.replica import without_local_sessions

pytestmark = pytest.mark.filterwarnings("ignore")


def deployed(tmp_path: Path, options: dict[str, Any] | None = None, **properties: object) -> Any:
    model = write_model(tmp_path, model_id="some/model", **properties)
    return application({"model_dir": str(model)} | (options or {}))._bound_deployment


def test_a_fixed_number_of_replicas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVING_DRAIN_TIMEOUT", "60")
    one = deployed(tmp_path, {"replicas": "2", "surge": 50})
    assert one.num_replicas == 2
    assert one._deployment_config.max_surge_percent == 50
    assert one._deployment_config.graceful_shutdown_timeout_s == 30 + 60 + 15
    assert one.init_args == (str(tmp_path), None)


def test_replicas_that_follow_the_load(tmp_path: Path) -> None:
    scaling = deployed(
        tmp_path, {"min_replicas": 0, "max_replicas": 3, "target": 4}
    )._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (0, 3, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replica": 1}, "replica\n  Extra inputs"),
        ({"replicas": 0}, "greater than or equal to 1"),
        ({"min_replicas": 1}, "give both or neither"),
        ({"min_replicas": 3, "max_replicas": 2}, "min_replicas is 3; expected at most max_replicas, which is 2"),
    ],
)
def test_options_that_are_wrong_are_named(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        deployed(tmp_path, options)


def test_settings_that_are_wrong_are_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="dtype"):
        deployed(tmp_path, dtype="nonsense")


def test_gpus_are_those_of_the_parallel_degrees_where_the_cluster_has_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    degrees = {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2}
    assert deployed(tmp_path, **degrees).ray_actor_options["num_gpus"] == 0
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": 8.0})
    assert deployed(tmp_path, **degrees).ray_actor_options["num_gpus"] == 4
    more = {"prefill_context_parallel_size": 2, "data_parallel_size": 2}
    assert deployed(tmp_path, **degrees, **more).ray_actor_options["num_gpus"] == 16
    assert deployed(tmp_path, {"gpus": 1}, **degrees).ray_actor_options["num_gpus"] == 1
    with monkeypatch.context() as patch:
        patch.setenv("SERVING_MAX_WORKERS", "2")
        assert deployed(tmp_path, **degrees).ray_actor_options["num_gpus"] == 8
    with pytest.raises(ValueError, match="`gpus`"):
        deployed(tmp_path, tensor_parallel_degree="max")
    spread = deployed(tmp_path, distributed_executor_backend="ray", **degrees)
    assert spread._replica_config.placement_group_bundles == [{"CPU": 1, "GPU": 1}, *[{"GPU": 1}] * 3]
    assert not spread.ray_actor_options.get("num_gpus")


def test_sessions_are_off_unless_they_are_kept_where_all_replicas_see_them(tmp_path: Path) -> None:
    def sessions(**properties: object) -> bool:
        model = write_model(tmp_path, model_id="some/model", **properties)
        (one,) = without_local_sessions(load_startup(model, {}, {})).models
        return one.settings.config.lmi.enable_stateful_sessions

    assert not sessions()
    assert sessions(sessions_path="/shared/sessions")
    assert sessions(sessions_s3url="s3://bucket/sessions")
    assert not sessions(sessions_path="/shared/sessions", enable_stateful_sessions=False)
