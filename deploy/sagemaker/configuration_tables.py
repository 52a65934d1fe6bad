"""Reads the tables within a configuration, each into its type; what is wrong becomes a problem of the `Table`."""

from __future__ import annotations

from deploy.sagemaker import instances
from deploy.sagemaker.configuration import (
    Adapter,
    Asynchronous,
    Autoscaling,
    Capacity,
    Capture,
    Component,
    Metrics,
    Pool,
    Rollout,
    Vpc,
)
from deploy.sagemaker.naming import NAME
from deploy.sagemaker.table import Table

PERIODS = (10, 30, 60, 120, 180, 240, 300)
"""Seconds between two publications of metrics, as the API has them."""
INSTANCE_EXPECTED = "an instance type such as ml.g6e.xlarge"

_S3 = r"s3://[^/\s]+(/\S*)?"
_TOPIC = r"arn:aws[a-z-]*:sns:[a-z0-9-]*:\d{12}:[\w.-]+"
_NETWORK_ID = r"[-0-9a-zA-Z]{1,32}"


def pool_of(table: Table) -> Pool:
    """One of `[[pools]]`."""
    pool = Pool(
        instance_type=table.required_text("instance_type", INSTANCE_EXPECTED, instances.TYPE.pattern),
        priority=table.integer("priority", 1, 5) or 1,
    )
    table.finish()
    return pool


def vpc_of(table: Table | None) -> Vpc | None:
    """`[vpc]`."""
    if table is None:
        return None
    vpc = Vpc(
        subnets=table.texts("subnets", "a subnet's id", _NETWORK_ID, most=16),
        security_groups=table.texts("security_groups", "a security group's id", _NETWORK_ID, most=5),
    )
    for key in ("subnets", "security_groups"):
        if key not in table:
            table.refuse(key, "a list of ids")
    table.finish()
    return vpc


def capture_of(table: Table | None) -> Capture | None:
    """`[capture]`."""
    if table is None:
        return None
    percent = table.integer("percent", 0, 100)
    capture = Capture(
        destination=table.required_text("destination", "an s3:// prefix", _S3),
        percent=100 if percent is None else percent,
        mode=table.choice("mode", ("input", "output", "both")) or "both",
    )
    table.finish()
    return capture


def metrics_of(table: Table | None) -> Metrics:
    """`[metrics]`; the defaults where there is none."""
    if table is None:
        return Metrics()
    detailed, period = table.boolean("detailed"), table.integer("period", 10, 300)
    if period is not None and period not in PERIODS:
        table.refuse("period", "one of " + ", ".join(map(str, PERIODS)))
        period = None
    metrics = Metrics(
        detailed=detailed is not False,
        enhanced=table.boolean("enhanced") or False,
        period=period or 60,
        path=table.text("path", "a path such as /metrics", r"/(?!.*\.\.)[a-zA-Z0-9/_.-]+") or "/metrics",
    )
    table.finish()
    return metrics


def _range(table: Table, least: int) -> tuple[int, int]:
    minimum, maximum = table.integer("min", least), table.integer("max", 1)
    for key in ("min", "max"):
        if key not in table:
            table.refuse(key, "a whole number")
    if minimum is not None and maximum is not None and minimum > maximum:
        table.refuse("max", f"at least min, which is {minimum}")
    return minimum or 0, maximum or 1


def capacity_of(table: Table | None) -> Capacity | None:
    """`[capacity]`."""
    if table is None:
        return None
    minimum, maximum = _range(table, 0)
    capacity = Capacity(
        minimum=minimum, maximum=maximum, strategy=table.choice("strategy", ("IDLE_RELEASE", "CONSOLIDATION"))
    )
    table.finish()
    return capacity


def component_of(table: Table | None) -> Component | None:
    """`[component]`."""
    if table is None:
        return None
    copies, cache = table.integer("copies", 0), table.boolean("cache")
    component = Component(
        copies=1 if copies is None else copies,
        gpus=table.integer("gpus", 1, 64),
        cpus=table.number("cpus", 0),
        memory_mb=table.integer("memory_mb", 128) or 1024,
        cache=cache is not False,
        placement=table.choice("placement", ("SPREAD", "BINPACK")),
    )
    table.finish()
    return component


def adapter_of(table: Table) -> Adapter:
    """One of `[[adapters]]`."""
    adapter = Adapter(
        name=table.required_text("name", "letters, digits and hyphens", NAME.pattern),
        source=table.required_text("source", "an s3:// archive that ends in .tar.gz", r"s3://[^/\s]+/\S+\.tar\.gz"),
    )
    table.finish()
    return adapter


def autoscaling_of(table: Table | None) -> Autoscaling | None:
    """`[autoscaling]`."""
    if table is None:
        return None
    minimum, maximum = _range(table, 0)
    target = table.number("target", 0)
    if "target" not in table:
        table.refuse("target", "concurrent requests for each instance or copy")
    scale_in, scale_out = table.integer("scale_in_cooldown", 0, 86400), table.integer("scale_out_cooldown", 0, 86400)
    autoscaling = Autoscaling(
        minimum=minimum,
        maximum=maximum,
        target=target or 1.0,
        scale_in_cooldown=300 if scale_in is None else scale_in,
        scale_out_cooldown=60 if scale_out is None else scale_out,
    )
    table.finish()
    return autoscaling


def asynchronous_of(table: Table | None) -> Asynchronous | None:
    """`[async]`."""
    if table is None:
        return None
    asynchronous = Asynchronous(
        output=table.required_text("output", "an s3:// prefix", _S3),
        failure=table.text("failure", "an s3:// prefix", _S3),
        concurrency=table.integer("concurrency", 1, 1000),
        success_topic=table.text("success_topic", "the ARN of an SNS topic", _TOPIC),
        error_topic=table.text("error_topic", "the ARN of an SNS topic", _TOPIC),
    )
    table.finish()
    return asynchronous


def rollout_of(table: Table | None) -> Rollout:
    """`[rollout]`; the defaults where there is none."""
    if table is None:
        return Rollout()
    wait = table.integer("wait", 0, 3600)
    rollout = Rollout(
        strategy=table.choice("strategy", ("blue-green", "canary", "linear", "rolling")) or "blue-green",
        step_percent=table.integer("step_percent", 5, 50) or 50,
        wait=300 if wait is None else wait,
        alarms=table.texts("alarms", "an alarm's name", r"\S.{0,254}", most=10),
    )
    table.finish()
    return rollout
