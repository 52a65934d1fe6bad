"""`slipway ray`: its output, and the options that it refuses."""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from deploy.ray.kuberay import RAY
from deploy.ray.serve_config import BALANCE, HAPROXY
from slipway.cli import app

ROOT = Path(__file__).parents[4]


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["ray", *arguments])


def test_the_configuration_is_serves_own_with_the_options_as_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTION_DTYPE", "bf16")
    said = run(
        "--model-dir", "/m", "--replicas", "2", "--port", "9000", "-e", "OPTION_DTYPE", "-e", "A=b=c", "--print-config"
    )
    assert yaml.safe_load(said.stdout) == {
        "proxy_location": "EveryNode",
        "http_options": {"host": "0.0.0.0", "port": 9000},
        "applications": [
            {
                "name": "slipway",
                "route_prefix": "/",
                "import_path": "deploy.ray:application",
                "runtime_env": {"env_vars": {"OPTION_DTYPE": "bf16", "A": "b=c"}},
                "args": {"model_dir": "/m", "replicas": 2},
            }
        ],
    }


def test_kuberays_manifest_has_that_configuration_and_machines_to_scale() -> None:
    options = ("--model-dir", "/m", "--min-replicas", "0", "--max-replicas", "3", "--gpus", "2", "--name", "mine")
    said = yaml.safe_load(run(*options, "--kuberay", "--image", "i:1").stdout)
    assert (said["kind"], said["metadata"]) == ("RayService", {"name": "mine"})
    assert yaml.safe_load(said["spec"]["serveConfigV2"]) == yaml.safe_load(run(*options, "--print-config").stdout)
    cluster = said["spec"]["rayClusterConfig"]
    assert (cluster["rayVersion"], cluster["enableInTreeAutoscaling"]) == (RAY, True)
    (workers,) = cluster["workerGroupSpecs"]
    assert (workers["replicas"], workers["minReplicas"], workers["maxReplicas"]) == (0, 0, 3)
    (container,) = workers["template"]["spec"]["containers"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 2}}
    assert {"name": HAPROXY, "value": "1"} in container["env"]
    (head,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    assert {port["name"] for port in head["ports"]} == {"serve", "gcs-server", "dashboard", "client"}


def test_pods_choose_replicas_by_prefix_if_that_is_asked_for() -> None:
    said = yaml.safe_load(run("--prefix-bytes", "256", "--kuberay", "--image", "i:1", "--gpus", "0").stdout)
    (workers,) = said["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    environment = workers["template"]["spec"]["containers"][0]["env"]
    (balance,) = [each["value"] for each in environment if each["name"] == BALANCE]
    assert balance.splitlines()[0] == "hash req.body,bytes(0,256),xxh64"


def test_the_release_is_the_one_that_is_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["ray"] == [f"ray[serve]=={RAY}"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--min-replicas", "1"), "give both or neither"),
        (("--replicas", "1", "--min-replicas", "1", "--max-replicas", "2"), "cannot be combined with --min-replicas"),
        (("-e", "SLIPWAY_IS_NOT_SET", "--print-config"), "the environment variable SLIPWAY_IS_NOT_SET is not set"),
        (("--kuberay",), "--image"),
        (("--kuberay", "--image", "i"), "--gpus"),
        (("--min-replicas", "3", "--max-replicas", "2"), "expected at least --min-replicas"),
        (("--target", "0"), "--target"),
        (("-e", "=x"), "expected NAME=VALUE or NAME"),
        (("--prefix-bytes", "8"), "Input should be greater than or equal to 16"),
        (("--prefix-bytes", "256", "--print-config"), "set RAY_SERVE_HAPROXY_BALANCE_ALGORITHM on the machines"),
        (("--prefix-bytes", "256", "--address", "auto"), "set RAY_SERVE_HAPROXY_BALANCE_ALGORITHM on the machines"),
        (("--model-dir", "/nowhere"), "slipway: "),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments: tuple[str, ...], message: str) -> None:
    said = run(*arguments)
    assert said.exit_code == 2
    assert message in " ".join(said.output.replace("│", " ").split())


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setenv("HF_MODEL_ID", "org/model")
    monkeypatch.setattr("os.environ", dict(os.environ))  # The command sets Ray's variables.
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    said = run()
    assert said.exit_code == 1
    command = f"pip install '{extras['ray'][0]}'"
    assert said.stderr == f"slipway: Ray is not installed: {command}\n"
    assert command in (ROOT / "docs" / "ray.md").read_text()


def test_a_cluster_that_is_not_there_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    pytest.importorskip("ray.serve", reason="Ray is not installed")

    def init(*_: object, **__: object) -> None:
        raise ConnectionError("Could not find any running Ray instance.")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setenv("HF_MODEL_ID", "org/model")
    monkeypatch.setattr("os.environ", dict(os.environ))
    said = run("--address", "auto")
    assert said.exit_code == 1
    assert said.stderr == "slipway: Ray cannot be reached: Could not find any running Ray instance.\n"


@pytest.mark.parametrize("where", [("--print-config",), ("--kuberay", "--image", "i"), ("--address", "auto")])
def test_keys_that_no_replica_would_get_are_refused(monkeypatch: pytest.MonkeyPatch, where: tuple[str, ...]) -> None:
    monkeypatch.setenv("SERVING_API_KEYS_FILE", "/keys")
    said = run("--model-dir", "/m", *where)
    assert said.exit_code == 2
    assert "SERVING_API_KEYS_FILE" in said.output


def test_keys_are_passed_on_if_they_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVING_API_KEYS_FILE", "/keys")
    said = run("--model-dir", "/m", "-e", "SERVING_API_KEYS_FILE", "--print-config")
    assert "SERVING_API_KEYS_FILE: /keys" in said.stdout
