"""The example for Kubernetes is valid by the schemas of Kubernetes' API.

tests/live/test_health_live.py and tests/live/test_process_live.py test the statuses of `/ping` that the probes need.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.monitoring import expressions, selections

FOLDER = Path(__file__).parents[3] / "examples" / "kubernetes"
OBJECTS: dict[str, Any] = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(FOLDER.glob("*.yaml"))}
MONITOR, ADAPTER = (
    yaml.safe_load((FOLDER / "monitoring" / f"{name}.yaml").read_text()) for name in ("pod_monitor", "adapter_values")
)
POD: Any = OBJECTS["deployment"]["spec"]["template"]
(CONTAINER,) = POD["spec"]["containers"]
RELEASES = ("1.30", "1.37")


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", OBJECTS)
def test_an_object_is_what_kubernetes_allows(name: str, release: str) -> None:
    kubernetes_validate.validate(OBJECTS[name], release, strict=True)
    wrong = copy.deepcopy(OBJECTS[name])
    wrong["spec"]["replica"] = 1
    with pytest.raises(kubernetes_validate.ValidationError, match="'replica' was unexpected"):
        kubernetes_validate.validate(wrong, release, strict=True)


def test_service_and_monitor_select_the_pods_and_their_port() -> None:
    labels, (port,) = POD["metadata"]["labels"], CONTAINER["ports"]
    deployment, service = OBJECTS["deployment"]["spec"], OBJECTS["service"]["spec"]
    assert deployment["selector"]["matchLabels"] == service["selector"] == labels
    assert MONITOR["spec"]["selector"]["matchLabels"] == labels
    (endpoint,) = MONITOR["spec"]["podMetricsEndpoints"]
    assert {service["ports"][0]["targetPort"], endpoint["port"]} == {port["name"]}
    probes = [CONTAINER[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")]
    assert probes == [{"path": "/ping", "port": port["name"]}] * 3


def test_a_pod_has_the_time_that_a_drain_takes() -> None:
    variables = {each["name"]: each.get("value") for each in CONTAINER["env"]}
    sleep = CONTAINER["lifecycle"]["preStop"]["sleep"]["seconds"]
    ends_by_itself = sleep + int(variables["SERVING_DRAIN_TIMEOUT"]) + 5
    assert ends_by_itself + 10 <= POD["spec"]["terminationGracePeriodSeconds"]
    readiness = CONTAINER["readinessProbe"]
    assert sleep >= readiness["periodSeconds"], "the Service has the time to leave the pod out"


def test_an_update_may_take_as_long_as_a_start() -> None:
    startup = CONTAINER["startupProbe"]
    seconds = startup["periodSeconds"] * startup["failureThreshold"]
    assert seconds == 1800
    assert OBJECTS["deployment"]["spec"]["progressDeadlineSeconds"] > seconds


def test_the_autoscaler_reads_a_metric_that_slipway_has() -> None:
    (rule,) = ADAPTER["rules"]["custom"]
    ((series, _),) = selections(rule["seriesQuery"])
    assert series in {name for expression in expressions() for name, _ in selections(expression)}
    spec = OBJECTS["autoscaler"]["spec"]
    (metric,) = spec["metrics"]
    assert metric["pods"]["metric"]["name"] == series
    target = {key: OBJECTS["deployment"][key] for key in ("apiVersion", "kind")}
    assert spec["scaleTargetRef"] == {**target, "name": OBJECTS["deployment"]["metadata"]["name"]}
    assert "replicas" not in OBJECTS["deployment"]["spec"], "an update would undo the autoscaler"
