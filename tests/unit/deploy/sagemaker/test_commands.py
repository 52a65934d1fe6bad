from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError

from deploy.sagemaker import aws
from tests.unit.deploy.sagemaker.commands import run_command
from tests.unit.deploy.sagemaker.configurations import IMAGE, ROLE
from tests.unit.deploy.sagemaker.fake_cloudformation import SESSION, FakeCloudFormation, stack_event

ROOT = Path(__file__).parents[4]
EXAMPLES = sorted((ROOT / "examples/deploy").glob("*.toml"))
SHORT = ["--name", "my-llm", "--model", "s3://models/llama/", "--image", IMAGE, "--role", ROLE]
SHORT += ["--instance-type", "ml.g6e.xlarge", "--region", "eu-west-1"]
ENDPOINT = "AWS::SageMaker::Endpoint"
PING = "The primary container for production variant AllTraffic did not pass the ping health check."
FAILURE = [
    ("Endpoint", ENDPOINT, "CREATE_FAILED", PING),
    stack_event("DELETE_IN_PROGRESS"),
    stack_event("DELETE_COMPLETE"),
]


def error(operation: str, message: str, code: str = "ValidationException") -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": message}}, operation)


def logged(event: str, milliseconds: int, message: str) -> dict[str, Any]:
    return {"eventId": event, "timestamp": milliseconds, "logStreamName": "s", "message": message}


class Services:
    """Clients of all services except CloudFormation. The test sets their answers; the default is an empty answer."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {
            "GetCallerIdentity": {"Account": "111122223333", "Arn": "arn:aws:iam::111122223333:root"},
            "DescribeRepositories": error("DescribeRepositories", "none", "RepositoryNotFoundException"),
            "GetAuthorizationToken": {"authorizationData": [{"authorizationToken": "QVdTOnNlY3JldA=="}]},
            "DescribeEndpoint": error("DescribeEndpoint", "Could not find endpoint"),
            "FilterLogEvents": {"events": [logged("1", 1000, "CUDA out of memory\n")]},
            "InvokeEndpoint": {"Body": io.BytesIO(b'{"generated_text": " Paris"}')},
        }
        self.called: dict[str, Any] = {}
        """The body of the last call of each operation."""

    def answer(self, model: Any, params: dict[str, Any], **more: Any) -> tuple[Any, Any]:
        self.called[model.name] = params["body"]
        found = self.answers.get(model.name, {})
        if isinstance(found, list):  # The answers to several calls.
            found = found.pop(0)
        if isinstance(found, ClientError):
            return SimpleNamespace(status_code=400), found.response
        return SimpleNamespace(status_code=200), found


@pytest.fixture
def services() -> Services:
    return Services()


@pytest.fixture
def cloudformation(monkeypatch: pytest.MonkeyPatch, services: Services) -> FakeCloudFormation:
    """The commands' AWS is in memory, and waiting takes no time."""
    made = FakeCloudFormation()
    clients: dict[str, Any] = {"cloudformation": made.client}

    def client(self: aws.Aws, service: str, **_: Any) -> Any:
        if service not in clients:
            clients[service] = SESSION.client(service)
            clients[service].meta.events.register("before-call", services.answer)
        return clients[service]

    monkeypatch.setattr(aws.Aws, "client", client)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    return made


@pytest.fixture
def _without_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*arguments: object, **more: object) -> None:
        raise AssertionError("AWS was called without credentials")

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setattr("botocore.client.BaseClient._make_api_call", refuse)


@pytest.mark.usefixtures("_without_credentials")
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_has_its_template_without_a_call(example: Path) -> None:
    assert f"slipway deploy examples/deploy/{example.name} --dry-run" in example.read_text()
    made = run_command("template", str(example))
    assert made.exit_code == 0, made.output
    assert "Endpoint" in yaml.safe_load(made.stdout)["Resources"]
    for command in ("deploy", "update"):
        done = run_command(command, str(example), "--dry-run")
        assert (done.exit_code, done.stdout) == (0, made.stdout), done.output
        assert done.stderr.endswith("\nslipway: note: no change set, because AWS credentials are missing\n")


def test_a_failure_is_rolled_back_and_its_exit_code_says_so(cloudformation: FakeCloudFormation) -> None:
    cloudformation.next_change(*FAILURE)
    done = run_command("deploy", *SHORT)
    assert done.exit_code == 1
    assert "did not pass the ping health check" in done.stderr
    assert "  log: 1970-01-01 00:00:01 CUDA out of memory" in done.stderr
    assert "Traceback" not in done.output
    assert cloudformation.status is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_is_rolled_back(number: signal.Signals, cloudformation: FakeCloudFormation) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # A process in the background ignores SIGINT.
    cloudformation.next_change(stack_event("CREATE_IN_PROGRESS"))

    def interrupt(operation: str) -> None:
        if operation == "ExecuteChangeSet":
            signal.raise_signal(number)

    cloudformation.after = interrupt
    try:
        assert run_command("deploy", *SHORT).exit_code == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert cloudformation.status is None


def test_an_update_of_what_is_not_there_is_in_the_way(cloudformation: FakeCloudFormation) -> None:
    done = run_command("update", *SHORT)
    assert (done.exit_code, done.stdout) == (3, "")
    assert done.stderr == "slipway: the stack slipway-my-llm does not exist; `slipway deploy` creates it\n"


ASYNC = ["invoke", "e", "--async", "--region", "eu-west-1"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["deploy"], "name: missing; expected at most 63 letters"),
        (
            ["deploy", *SHORT, "--instance-type", "g6e.xlarge"],
            "instance_type: expected an instance type, such as ml.g6e.xlarge",
        ),
        (["deploy", *SHORT, "--env", "HF_TOKEN"], "--env: expected NAME=VALUE"),
        (["deploy", *SHORT, "--env", "=x"], "--env: expected NAME=VALUE"),
        (["deploy", *SHORT, "--set", "a"], "--set: expected NAME=VALUE"),
        (["deploy", *SHORT, "--set", "a="], "--set a: expected a TOML value"),
        (["deploy", "none.toml"], "none.toml: No such file"),
        (["invoke", "e"], "--prompt: missing"),
        ([*ASYNC, "--prompt", "Hi", "--stream"], "--stream: not possible with asynchronous calls"),
        ([*ASYNC, "--prompt", "Hi", "--component", "c"], "--component: not possible with asynchronous calls"),
        ([*ASYNC, "--body", "x" * 128_001], "the request has 128001 bytes; expected at most 128000, or an S3 object"),
        (["invoke", "e", "--prompt", "x", "--api-key", "k", "--region", "eu-west-1"], "--api-key: "),
        (
            ["template", *SHORT, "--set", "component.path=/other"],
            "component.path: there is no such field; expected one of gpus",
        ),
    ],
)
def test_what_is_wrong_is_exit_code_two_and_a_line(arguments: list[str], said: str) -> None:
    done = run_command(*arguments)
    assert done.exit_code == 2
    assert said in done.stderr
    assert "Traceback" not in done.output


@pytest.mark.usefixtures("_without_credentials")
def test_without_a_role_a_region_and_credentials_a_dry_run_prints_a_stack_with_a_role(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    page = (ROOT / "docs" / "deploy.md").read_text()
    command = re.search(r"^slipway deploy (--name(?:.*\\\n)*.*)$", page, re.M)
    assert command
    arguments = command[1].replace("\\\n", " ")
    done = run_command("deploy", *arguments.split(), "--dry-run")
    assert done.exit_code == 0, done.output
    assert yaml.safe_load(done.stdout)["Resources"]["Role"]["Type"] == "AWS::IAM::Role"


@pytest.mark.usefixtures("_without_credentials")
def test_a_dry_run_is_for_the_region_that_the_deployment_is_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config").write_text("[profile prod]\nregion = eu-west-1\n")
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    done = run_command("deploy", *SHORT[:-2], "--profile", "prod", "--dry-run")
    assert done.exit_code == 0, done.stderr
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    for option in ("--region=eu-west-1", "--set=region=eu-west-1"):
        done = run_command("deploy", *SHORT[:-2], option, "--dry-run")
        assert done.exit_code == 0, done.stderr
    assert "image is in eu-west-1; expected one in us-east-1" in run_command("deploy", *SHORT[:-2], "--dry-run").stderr


def test_a_dry_run_says_that_the_command_would_refuse(cloudformation: FakeCloudFormation) -> None:
    missing = run_command("update", *SHORT, "--dry-run")
    assert (missing.exit_code, ENDPOINT in missing.stdout) == (3, True)
    assert "the stack slipway-my-llm does not exist; `slipway deploy` creates it" in missing.stderr
    assert run_command("deploy", *SHORT).exit_code == 0
    assert run_command("deploy", *SHORT, "--dry-run").exit_code == 0
    for dry in ([], ["--dry-run"]):
        changed = run_command("deploy", *SHORT, "--env", "A=1", *dry)
        assert changed.exit_code == 3
        assert "my-llm exists and differs in Model" in changed.stderr
    assert cloudformation.changes[-1] == "DeleteChangeSet"
    cloudformation.status = "UPDATE_IN_PROGRESS"
    busy = run_command("update", *SHORT, "--dry-run")
    assert (busy.exit_code, "UPDATE_IN_PROGRESS" in busy.stderr) == (3, True)
    busy = run_command("deploy", *SHORT, "--dry-run")
    assert busy.exit_code == 0
    assert "note: no change set: the stack slipway-my-llm is UPDATE_IN_PROGRESS and cannot" in busy.stderr


@pytest.mark.usefixtures("cloudformation")
@pytest.mark.parametrize("name", [b"weights\xff", b"a\nb", b"\x1b[31m"])
def test_a_file_whose_name_is_no_key_is_refused_before_anything_is_uploaded(tmp_path: Path, name: bytes) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).touch()
    (tmp_path / "a").touch()
    for dry in ([], ["--dry-run"]):
        done = run_command("deploy", *SHORT, "--upload", str(tmp_path), *dry)
        assert done.exit_code == 1, done.output
        assert "UTF-8" in done.stderr
        assert done.stderr.isascii()
        assert "uploading" not in done.stderr
    assert run_command("deploy", *SHORT, "--upload", "/nowhere", "--dry-run").exit_code == 1


def test_a_dry_run_without_a_network_shows_the_template(cloudformation: FakeCloudFormation) -> None:
    def lost(operation: str) -> None:
        raise EndpointConnectionError(endpoint_url="https://cloudformation.eu-west-1.amazonaws.com/")

    cloudformation.after = lost
    done = run_command("deploy", *SHORT, "--dry-run")
    assert done.exit_code == 0
    assert ENDPOINT in done.stdout
    assert "note: no change set: Could not connect to the endpoint URL" in done.stderr


def test_without_a_region_it_says_where_one_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    done = run_command("status", "my-llm")
    assert done.exit_code == 2
    assert "region: missing; give --region, or set AWS_REGION" in done.stderr


STATUS = {
    "DescribeEndpoint": {
        "EndpointStatus": "InService",
        "ProductionVariants": [{"VariantName": "AllTraffic", "CurrentInstanceCount": 1, "DesiredInstanceCount": 2}],
    },
    "ListInferenceComponents": {"InferenceComponents": [{"InferenceComponentName": "my-llm-french"}]},
    "DescribeInferenceComponent": {
        "InferenceComponentName": "my-llm-french",
        "InferenceComponentStatus": "InService",
        "Specification": {"BaseInferenceComponentName": "my-llm"},
    },
    "DescribeScalableTargets": {"ScalableTargets": [{"MinCapacity": 0, "MaxCapacity": 2}]},
}


def test_status_shows_stack_endpoint_components_and_scaling(
    cloudformation: FakeCloudFormation, services: Services
) -> None:
    cloudformation.there("UPDATE_COMPLETE")
    services.answers |= STATUS
    found = json.loads(run_command("status", "my-llm", "--json").stdout)
    assert found == {
        "stack": "UPDATE_COMPLETE",
        "endpoint": STATUS["DescribeEndpoint"],
        "components": [STATUS["DescribeInferenceComponent"]],
        "scaling": 2 * STATUS["DescribeScalableTargets"]["ScalableTargets"],
    }
    shown = run_command("status", "my-llm").stdout
    assert shown.startswith("stack: UPDATE_COMPLETE\nendpoint:\n  EndpointStatus: InService\n")
    assert yaml.safe_load(shown) == found


def test_the_status_of_nothing_is_a_line_and_exit_code_one(cloudformation: FakeCloudFormation) -> None:
    done = run_command("status", "my-llm")
    assert done.exit_code == 1
    assert done.stderr.endswith("when calling the DescribeEndpoint operation: Could not find endpoint\n")
    assert len(done.stderr.splitlines()) == 1
    cloudformation.there("CREATE_IN_PROGRESS")
    assert run_command("status", "my-llm").stdout == "stack: CREATE_IN_PROGRESS\nendpoint: null\n"


def test_invoke_and_logs(cloudformation: FakeCloudFormation) -> None:
    assert run_command("invoke", "my-llm", "--prompt", "x").stdout == '{"generated_text": " Paris"}\n'
    assert run_command("logs", "my-llm").stdout == "1970-01-01 00:00:01 CUDA out of memory\n"


def test_an_answer_of_several_lines_that_a_model_refused_with_is_one_line(
    cloudformation: FakeCloudFormation, services: Services
) -> None:
    text = 'Received client error (424) with message "{\n  "code": 424\n}\n".'
    services.answers["InvokeEndpoint"] = error("InvokeEndpoint", text, "ModelError")
    done = run_command("invoke", "my-llm", "--prompt", "x")
    assert done.exit_code == 1
    assert done.stderr.endswith('Received client error (424) with message "{ "code": 424 } ".\n')
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (error("DescribeStacks", "no", "AccessDenied"), "(AccessDenied) when calling the DescribeStacks operation: no"),
        (NoCredentialsError(), "Unable to locate credentials"),
    ],
)
def test_an_error_of_aws_is_one_line(raised: Exception, said: str, cloudformation: FakeCloudFormation) -> None:
    def fail(operation: str) -> None:
        raise raised

    cloudformation.after = fail
    done = run_command("deploy", *SHORT)
    assert done.exit_code == 1
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_why_the_log_of_what_does_not_start_cannot_be_read_is_said(
    cloudformation: FakeCloudFormation, services: Services
) -> None:
    services.answers["FilterLogEvents"] = error("FilterLogEvents", "no", "AccessDeniedException")
    cloudformation.next_change(*FAILURE)
    done = run_command("deploy", *SHORT)
    assert done.exit_code == 1
    assert "  log: (An error occurred (AccessDeniedException)" in done.stderr
    assert "did not pass the ping health check" in done.stderr.splitlines()[-1]


def test_a_body_that_is_no_text_is_sent_as_it_is(cloudformation: FakeCloudFormation) -> None:
    assert run_command("invoke", "my-llm", "--body", "\udcff").exit_code == 0


def test_a_log_is_read_page_after_page(cloudformation: FakeCloudFormation, services: Services) -> None:
    pages = [{"events": [logged("1", 1000, "a\n")], "nextToken": "2"}, {"events": [logged("2", 2000, "b\n")]}]
    services.answers["FilterLogEvents"] = pages
    assert run_command("logs", "my-llm").stdout == "1970-01-01 00:00:01 a\n1970-01-01 00:00:02 b\n"


def test_the_log_of_nothing_is_a_line_and_exit_code_one(cloudformation: FakeCloudFormation, services: Services) -> None:
    services.answers["FilterLogEvents"] = error(
        "FilterLogEvents", "The specified log group does not exist.", "ResourceNotFoundException"
    )
    done = run_command("logs", "my-llm")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == (
        "slipway: the log group /aws/sagemaker/Endpoints/my-llm does not exist: nothing was logged there yet\n"
    )


HOST = "111122223333.dkr.ecr.eu-west-1.amazonaws.com"
PUSH = ["--name", "my-llm", "--model", "org/m", "--instance-type", "ml.g6e.xlarge"]
PUSH += ["--push", "slipway:gpu", "--image"]


Ran = list[tuple[tuple[str, ...], str | None]]


@pytest.fixture
def docker(cloudformation: FakeCloudFormation, monkeypatch: pytest.MonkeyPatch) -> Ran:
    """The commands of docker, each with its input. All of them succeed."""
    ran = []

    def run(command: tuple[str, ...], input: str | None, **more: Any) -> subprocess.CompletedProcess[str]:
        ran.append((command, input))
        if cloudformation.status is None:
            assert "ExecuteChangeSet" not in cloudformation.changes
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    return ran


def test_a_local_image_is_pushed_before_anything_needs_it(
    cloudformation: FakeCloudFormation, services: Services, docker: Ran
) -> None:
    done = run_command("deploy", *PUSH, f"{HOST}/slipway:gpu", "--region", "eu-west-1")
    assert done.exit_code == 0, done.output
    assert json.loads(services.called["CreateRepository"]) == {
        "registryId": "111122223333",
        "repositoryName": "slipway",
        "imageScanningConfiguration": {"scanOnPush": True},
    }
    assert docker == [
        (("docker", "login", "--username", "AWS", "--password-stdin", HOST), "secret"),
        (("docker", "tag", "slipway:gpu", f"{HOST}/slipway:gpu"), None),
        (("docker", "push", f"{HOST}/slipway:gpu"), None),
    ]
    model = cloudformation.template["Resources"]["Model"]["Properties"]
    assert model["PrimaryContainer"]["Image"] == f"{HOST}/slipway:gpu"


@pytest.mark.parametrize(("tag", "note"), [("gpu", True), ("gpu-2", False)])
def test_an_update_pushes_an_image_too_and_says_when_its_tag_is_that_of_what_runs(
    tag: str, note: bool, docker: Ran
) -> None:
    assert run_command("deploy", *PUSH, f"{HOST}/slipway:gpu").exit_code == 0
    again = run_command("deploy", *PUSH, f"{HOST}/slipway:gpu")
    assert (again.exit_code, "still runs the old image" in again.stderr) == (0, True)
    docker.clear()
    done = run_command("update", *PUSH, f"{HOST}/slipway:{tag}")
    assert done.exit_code == 0, done.output
    assert docker[-1] == (("docker", "push", f"{HOST}/slipway:{tag}"), None)
    assert ("still runs the old image" in done.stderr) is note
    assert done.stdout == ("my-llm is up to date\n" if note else "my-llm is updated\n")


def test_an_account_that_allows_pushes_alone_is_pushed_to(services: Services, docker: Ran) -> None:
    services.answers["DescribeRepositories"] = error("DescribeRepositories", "no", "AccessDeniedException")
    assert run_command("deploy", *PUSH, f"{HOST}/slipway:gpu").exit_code == 0
    assert docker[-1][0] == ("docker", "push", f"{HOST}/slipway:gpu")
    assert "CreateRepository" not in services.called


def test_without_docker_the_push_fails_and_no_stack_is_made(
    cloudformation: FakeCloudFormation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    done = run_command("deploy", *PUSH, f"{HOST}/slipway:gpu")
    assert done.exit_code == 1
    assert "docker is not installed" in done.stderr
    assert cloudformation.status is None


@pytest.mark.usefixtures("_without_credentials")
def test_a_dry_run_says_what_would_be_pushed() -> None:
    done = run_command("deploy", *PUSH, f"{HOST}/slipway:gpu", "--dry-run")
    assert f"slipway:gpu would be pushed as {HOST}/slipway:gpu\n" in done.stderr


def test_the_command_line_imports_no_boto3_until_it_is_needed() -> None:
    code = "import sys, slipway.cli; sys.exit(bool({'boto3', 'botocore', 'yaml'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
