"""The commands against moto's AWS, with the resources of a stack that moto supports."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from moto import mock_aws
from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.sagemaker.models import FakeEndpoint
from moto.sagemakerruntime.models import sagemakerruntime_backends

from deploy.sagemaker import endpoint
from deploy.sagemaker.model_upload import UploadFailed, upload_model
from tests.unit.deploy.sagemaker.commands import run_command
from tests.unit.deploy.sagemaker.configurations import IMAGE, ROLE
from tests.unit.deploy.sagemaker.fake_cloudformation import SESSION

# moto has no scaling and no inference components in stacks. It does not check that a role exists.
SHORT = ["--name", "my-llm", "--model", "s3://models/llama/", "--instance-type", "ml.g4dn.xlarge", "--image", IMAGE]
GIVEN = [*SHORT, "--role", ROLE]


def _no_components(**more: Any) -> tuple[Any, dict[str, Any]]:
    return SimpleNamespace(status_code=200), {"InferenceComponents": []}


@pytest.fixture(autouse=True)
def _aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # AWS uses the name of the template for the endpoint. moto would make up a name.
    monkeypatch.setattr(FakeEndpoint, "cloudformation_name_type", staticmethod(lambda: "EndpointName"))
    monkeypatch.setattr("boto3.Session", lambda **more: SESSION)
    # moto has no inference components.
    listing = "before-call.sagemaker.ListInferenceComponents"
    SESSION.events.register(listing, _no_components)
    with mock_aws():
        yield
    SESSION.events.unregister(listing, _no_components)


def _there() -> dict[str, int]:
    sagemaker: Any = SESSION.client("sagemaker")
    return {
        "models": len(sagemaker.list_models()["Models"]),
        "configurations": len(sagemaker.list_endpoint_configs()["EndpointConfigs"]),
        "endpoints": len(sagemaker.list_endpoints()["Endpoints"]),
        "roles": len(SESSION.client("iam").list_roles()["Roles"]),
        "stacks": len(SESSION.client("cloudformation").describe_stacks()["Stacks"]),
    }


def _bucket(name: str) -> Any:
    """Create a bucket, and return a client of S3."""
    s3: Any = SESSION.client("s3")
    s3.create_bucket(Bucket=name, CreateBucketConfiguration={"LocationConstraint": "eu-west-1"})
    return s3


def test_a_deployment_is_made_kept_updated_and_removed() -> None:
    made = run_command("deploy", *GIVEN, "--env", "OPTION_DTYPE=fp16", "--set", "tags.team=ads")
    assert (made.exit_code, made.stdout) == (0, "my-llm is in service\n"), made.output
    assert "slipway-my-llm CREATE_COMPLETE" in made.stderr
    assert 'try: slipway invoke my-llm --region eu-west-1 --prompt "Hello"' in made.stderr
    assert _there() == {"models": 1, "configurations": 1, "endpoints": 1, "roles": 0, "stacks": 1}
    sagemaker: Any = SESSION.client("sagemaker")
    first = sagemaker.describe_endpoint(EndpointName="my-llm")
    config = sagemaker.describe_endpoint_config(EndpointConfigName=first["EndpointConfigName"])
    variant = config["ProductionVariants"][0]
    assert (variant["InstanceType"], variant["InitialInstanceCount"]) == ("ml.g4dn.xlarge", 1)
    model = sagemaker.describe_model(ModelName=variant["ModelName"])
    assert model["PrimaryContainer"]["Environment"]["OPTION_DTYPE"] == "fp16"
    assert model["PrimaryContainer"]["ModelDataSource"]["S3DataSource"]["S3Uri"] == "s3://models/llama/"
    # CloudFormation adds the stack's tags to its resources. moto does not.
    (stack,) = SESSION.client("cloudformation").describe_stacks()["Stacks"]
    assert {each["Key"]: each["Value"] for each in stack["Tags"]} == {"slipway:endpoint": "my-llm", "team": "ads"}

    again = run_command("deploy", *GIVEN, "--env", "OPTION_DTYPE=fp16", "--set", "tags.team=ads")
    assert (again.exit_code, again.stdout) == (0, "my-llm is in service\n"), again.output
    other = run_command("deploy", *GIVEN, "--env", "OPTION_DTYPE=bf16")
    assert other.exit_code == 3
    assert "my-llm exists and differs in " in other.stderr
    assert "run `slipway update` to change it" in other.stderr

    updated = run_command("update", *GIVEN, "--env", "OPTION_DTYPE=bf16")
    assert (updated.exit_code, updated.stdout) == (0, "my-llm is updated\n"), updated.output
    assert run_command("update", *GIVEN, "--env", "OPTION_DTYPE=bf16").stdout == "my-llm is up to date\n"

    shown = json.loads(run_command("status", "my-llm", "--json").stdout)
    assert (shown["endpoint"]["EndpointStatus"], shown["stack"]) == ("InService", "UPDATE_COMPLETE")
    gone = run_command("destroy", "my-llm")
    assert (gone.exit_code, gone.stdout) == (0, "my-llm is removed\n")
    assert set(_there().values()) == {0}
    again = run_command("destroy", "my-llm")
    assert (again.exit_code, bool(re.search("slipway-my-llm .* eu-west-1", again.stderr))) == (1, True)


def test_a_role_is_made_with_its_policy_and_goes_with_the_stack() -> None:
    assert run_command("deploy", *SHORT).exit_code == 0
    iam: Any = SESSION.client("iam")
    (role,) = iam.list_roles()["Roles"]
    assert role["RoleName"].startswith("slipway-my-llm-")
    (name,) = iam.list_role_policies(RoleName=role["RoleName"])["PolicyNames"]
    document = iam.get_role_policy(RoleName=role["RoleName"], PolicyName=name)["PolicyDocument"]
    assert "arn:aws:s3:::models/llama/*" in str(document)
    assert run_command("destroy", "my-llm").exit_code == 0
    assert iam.list_roles()["Roles"] == []


def test_a_dry_run_shows_what_would_change_and_leaves_nothing() -> None:
    before = _there()
    new = run_command("deploy", *GIVEN, "--dry-run")
    assert new.exit_code == 0, new.output
    assert "AWS::SageMaker::EndpointConfig" in new.stdout
    assert "a new stack:" in new.stderr
    assert "Endpoint " in new.stderr
    assert _there() == before
    run_command("deploy", *GIVEN)
    assert "nothing would change" in run_command("update", *GIVEN, "--dry-run").stderr
    assert "changes:" in run_command("update", *GIVEN, "--env", "A=1", "--dry-run").stderr
    assert "OPTION" not in json.dumps(run_command("status", "my-llm", "--json").stdout)
    assert run_command("update", *GIVEN).stdout == "my-llm is up to date\n"


def test_a_model_is_uploaded_first_and_again_what_has_changed(tmp_path: Path) -> None:
    s3 = _bucket("models")
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer/vocab.txt").write_text("a")
    made = run_command("deploy", *GIVEN, "--upload", str(tmp_path))
    assert made.exit_code == 0, made.output
    keys = [entry["Key"] for entry in s3.list_objects_v2(Bucket="models")["Contents"]]
    assert keys == ["llama/config.json", "llama/tokenizer/vocab.txt"]
    (tmp_path / "config.json").write_text('{"a": 1}')
    again = run_command("update", *GIVEN, "--upload", str(tmp_path))
    assert again.stderr.count("uploading") == 1
    assert s3.get_object(Bucket="models", Key="llama/config.json")["Body"].read() == b'{"a": 1}'
    assert "still runs the old image" in again.stderr


def test_a_file_of_the_same_size_and_an_older_time_is_uploaded_and_so_is_what_others_have_put_there(
    tmp_path: Path,
) -> None:
    s3 = _bucket("models")
    weights = tmp_path / "model.safetensors"
    large = 9 << 20  # boto3 uploads a file of this size in several parts.
    told: list[str] = []
    for content, uploads in ((b"a" * large, 1), (b"a" * large, 0), (b"b" * large, 1)):
        weights.write_bytes(content)
        os.utime(weights, (0, 0))
        told.clear()
        upload_model(s3, tmp_path, "s3://models/llama", told.append)
        assert len(told) == uploads
        assert s3.get_object(Bucket="models", Key="llama/model.safetensors")["Body"].read() == content
    s3.put_object(Bucket="models", Key="llama/model.safetensors", Body=b"c" * large)
    upload_model(s3, tmp_path, "s3://models/llama/", told.append)
    assert s3.get_object(Bucket="models", Key="llama/model.safetensors")["Body"].read() == b"b" * large


def test_links_are_followed_and_those_that_lead_nowhere_are_named(tmp_path: Path) -> None:
    s3 = _bucket("models")
    model, elsewhere = tmp_path / "model", tmp_path / "elsewhere"
    for directory in (model, elsewhere):
        directory.mkdir()
        (directory / "config.json").write_text("{}")
    (model / "adapters").symlink_to(elsewhere)
    upload_model(s3, model, "s3://models/m", [].append)
    keys = [entry["Key"] for entry in s3.list_objects_v2(Bucket="models")["Contents"]]
    assert keys == ["m/adapters/config.json", "m/config.json"]
    (model / "weights").symlink_to(tmp_path / "gone")
    with pytest.raises(UploadFailed, match=r"weights .*/gone"):
        upload_model(s3, model, "s3://models/m", [].append)
    (model / "weights").unlink()
    (elsewhere / "up").symlink_to(elsewhere)
    with pytest.raises(UploadFailed, match="up "):
        upload_model(s3, model, "s3://models/m", [].append)


def test_a_directory_that_is_not_there_leaves_no_stack() -> None:
    done = run_command("deploy", *GIVEN, "--upload", "/nowhere")
    assert done.exit_code == 1
    assert "slipway: /nowhere: " in done.stderr
    assert _there()["stacks"] == 0


def test_an_asynchronous_call_prints_its_answer_or_the_reason_of_its_failure() -> None:
    results = sagemakerruntime_backends[DEFAULT_ACCOUNT_ID]["eu-west-1"].async_results_queue
    results += [(False, '{"generated_text": " Paris"}'), (True, "no such model"), (False, "{}")]
    done = run_command("invoke", "my-llm", "--async", "--prompt", "Hi")
    assert (done.exit_code, done.stdout) == (0, '{"generated_text": " Paris"}\n'), done.output
    failed = run_command("invoke", "my-llm", "--async", "--input-location", "s3://in/1.json")
    assert (failed.exit_code, failed.stdout) == (1, "")
    assert failed.stderr.startswith("slipway: the request failed: no such model (s3://")
    place = run_command("invoke", "my-llm", "--input-location", "s3://in/2.json").stdout
    assert place.startswith("s3://")


def test_an_answer_is_waited_for_until_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    s3 = _bucket("answers")
    places = endpoint.Places("s3://answers/out/1.out", None)
    with pytest.raises(endpoint.NoAnswer, match=r"0 s; .*s3://answers/out/1\.out"):
        endpoint.wait_for_answer(s3, places, 0)
    waited: list[float] = []

    def answer_at_the_second_look(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 2:
            s3.put_object(Bucket="answers", Key="out/1.out", Body=b"{}")

    monkeypatch.setattr("time.sleep", answer_at_the_second_look)
    assert endpoint.wait_for_answer(s3, places, 600) == b"{}"
    assert len(waited) == 2


def test_the_hint_after_a_deployment_is_a_call_that_the_endpoint_takes() -> None:
    done = run_command("deploy", *GIVEN, "--set", "async.output=s3://answers/")
    assert done.exit_code == 0, done.output
    assert 'try: slipway invoke my-llm --region eu-west-1 --async --prompt "Hello"' in done.stderr
