from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from deploy.cli import app
from deploy.sagemaker import aws
from deploy.sagemaker.api_call import ApiCall
from deploy.sagemaker.executor import Executor
from deploy.sagemaker.presence import Surroundings
from deploy.sagemaker.resource import ENDPOINT
from deploy.sagemaker.service_errors import in_words
from tests.unit.deploy.cloud import MemoryCloud, error
from tests.unit.deploy.configurations import IMAGE, ROLE, planned

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted((ROOT / "examples/deploy").glob("*.toml"))
SHORT = ["--model", "s3://models/llama/", "--image", IMAGE, "--role", ROLE, "--instance-type", "ml.g6e.xlarge"]
SHORT += ["--region", "eu-west-1"]


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch, cloud: MemoryCloud) -> MemoryCloud:
    """The commands' own AWS is the one in memory, and waiting takes no time."""

    class Aws:
        region = "eu-west-1"

        def __init__(self, region: str | None = None, profile: str | None = None) -> None:
            self.call = self._call

        def _call(self, call: ApiCall) -> dict[str, Any]:
            if call.service == "sagemaker-runtime":
                return {"Body": io.BytesIO(b'{"generated_text": " Paris"}')}
            if call.operation == "get_authorization_token":
                return {"authorizationData": [{"authorizationToken": "QVdTOnNlY3JldA=="}]}
            if call.operation == "get_caller_identity":
                return {"Account": "111122223333", "Arn": "arn:aws:iam::111122223333:root"}
            if call.operation == "get_role" and call.parameters["RoleName"] == "models":
                raise error("get_role", "not allowed", "AccessDenied")
            return cloud.call(call)

    monkeypatch.setattr(aws, "AwsCloud", Aws)
    monkeypatch.setattr("deploy.sagemaker.progress.RealClock.sleep", lambda self, seconds: None)
    return cloud


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_planned_without_a_call(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **more: object) -> None:
        raise AssertionError("a dry run called AWS")

    monkeypatch.setattr("botocore.client.BaseClient._make_api_call", refuse)
    for command in ("deploy", "update"):
        done = _run(command, str(example), "--dry-run")
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)[0]["operation"] == "create_model"
    assert _run("template", str(example)).exit_code == 0


def test_a_deployment_from_the_command_line_alone(memory: MemoryCloud) -> None:
    done = _run("deploy", "--name", "my-llm", *SHORT, "--env", "OPTION_DTYPE=fp16", "--tag", "team=ads")
    assert done.exit_code == 0, done.output
    assert done.stdout == "my-llm is in service\n"
    assert "note: the role could not be checked" in done.stderr
    assert "creating endpoint my-llm" in done.stderr
    assert (ENDPOINT, "my-llm") in memory.things
    again = _run("deploy", "--name", "my-llm", *SHORT, "--env", "OPTION_DTYPE=fp16", "--tag", "team=ads")
    assert "endpoint my-llm: there already" in again.stderr
    assert _run("deploy", "--name", "my-llm", *SHORT).exit_code == 3
    assert _run("update", "--name", "my-llm", *SHORT).stdout == "my-llm is updated\n"
    assert _run("update", "--name", "my-llm", *SHORT).stdout == "my-llm is up to date\n"


def test_a_failure_is_rolled_back_and_its_exit_code_says_so(memory: MemoryCloud) -> None:
    memory.failing.add("my-llm")
    done = _run("deploy", "--name", "my-llm", *SHORT)
    assert done.exit_code == 1
    assert "did not pass the ping health check" in done.stderr
    assert memory.names == []
    kept = _run("deploy", "--name", "my-llm", *SHORT, "--no-rollback")
    assert kept.exit_code == 1
    assert "left: endpoint my-llm" in kept.stderr
    assert "`slipway destroy` removes it" in kept.stderr
    assert _run("destroy", "my-llm").exit_code == 0
    assert memory.names == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_is_rolled_back(number: signal.Signals, memory: MemoryCloud) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background ignores it

    def interrupt(call: ApiCall) -> None:
        if call.operation == "create_endpoint":
            signal.raise_signal(number)

    memory.after = interrupt
    try:
        assert _run("deploy", "--name", "my-llm", *SHORT).exit_code == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert memory.names == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["deploy"], "model: missing"),
        (["deploy", *SHORT, "--instance-type", "ml.g6e.xl"], "one of 277 values, such as ml.g6e.xlarge"),
        (["deploy", *SHORT, "--env", "HF_TOKEN"], "--env: expected NAME=VALUE"),
        (["deploy", "none.toml"], "none.toml: No such file"),
        (["invoke", "e"], "--prompt: missing"),
        (["template", *SHORT, "--set", "metrics.period=30"], "CloudFormation knows only"),
    ],
)
def test_what_is_wrong_is_exit_code_two_and_a_line(arguments: list[str], said: str) -> None:
    done = _run(*arguments)
    assert done.exit_code == 2
    assert said in done.stderr
    assert "Traceback" not in done.output


def test_a_dry_run_is_for_the_region_that_the_deployment_is_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config").write_text("[profile prod]\nregion = eu-west-1\n")
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    done = _run("deploy", *SHORT[:-2], "--profile", "prod", "--dry-run")
    assert done.exit_code == 0, done.stderr
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    for option in ("--region=eu-west-1", "--set=region=eu-west-1"):
        done = _run("deploy", *SHORT[:-2], option, "--dry-run")
        assert done.exit_code == 0, done.stderr
    assert "image is in eu-west-1; expected one in us-east-1" in _run("deploy", *SHORT[:-2], "--dry-run").stderr


def test_without_a_region_it_says_where_one_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    done = _run("status", "my-llm")
    assert done.exit_code == 2
    assert "no region: give --region, or set AWS_REGION" in done.stderr


def test_status_invoke_logs_and_destroy(memory: MemoryCloud, around: Surroundings) -> None:
    Executor(around).deploy(planned("adapters"))
    shown = _run("status", "my-llm").stdout
    assert "endpoint       my-llm: InService" in shown
    assert "component      my-llm-french: InService, on my-llm" in shown
    assert json.loads(_run("status", "my-llm", "--json").stdout)["status"] == "InService"
    assert _run("invoke", "my-llm", "--prompt", "x").stdout == '{"generated_text": " Paris"}\n'
    assert _run("logs", "my-llm").stdout == "1970-01-01 00:00:01 CUDA out of memory\n"
    dry = _run("destroy", "my-llm", "--dry-run").stdout
    assert "would remove: endpoint my-llm" in dry
    assert "removed: endpoint my-llm" in _run("destroy", "my-llm").stdout
    assert _run("destroy", "my-llm").stdout == "there is nothing of my-llm\n"
    assert _run("status", "my-llm").exit_code == 1


def test_an_answer_of_several_lines_that_a_model_refused_with_is_one_line() -> None:
    refused = error("InvokeEndpoint", 'Received client error (424) with message "{\n  "code": 424\n}\n".', "ModelError")
    assert in_words(refused) == (
        'InvokeEndpoint: ModelError: Received client error (424) with message "{ "code": 424 } ".'
    )


def test_a_body_that_is_no_text_is_sent_as_it_is(memory: MemoryCloud) -> None:
    assert _run("invoke", "my-llm", "--body", "\udcff").exit_code == 0


def test_the_log_of_nothing_is_a_line_and_exit_code_one(memory: MemoryCloud) -> None:
    def refuse(call: ApiCall) -> None:
        if call.operation == "filter_log_events":
            raise error(call.operation, "The specified log group does not exist.", "ResourceNotFoundException")

    memory.before = refuse
    done = _run("logs", "my-llm")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == (
        "slipway: there is no log group /aws/sagemaker/Endpoints/my-llm: nothing has logged there yet\n"
    )


def test_an_endpoint_that_is_not_ours_stays_and_the_exit_code_says_so(memory: MemoryCloud) -> None:
    memory.add(ENDPOINT, "my-llm", {"EndpointName": "my-llm", "EndpointConfigName": "theirs"})
    done = _run("destroy", "my-llm")
    assert done.exit_code == 3
    assert "not of this deployment, kept: endpoint my-llm" in done.stderr


def test_a_local_image_is_pushed_before_anything_needs_it(memory: MemoryCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[tuple[str, ...], str | None, list[str]]] = []

    def run(command: tuple[str, ...], input: str | None, **more: Any) -> subprocess.CompletedProcess[str]:
        ran.append((command, input, memory.names))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    arguments = ["deploy", "--name", "my-llm", "--model", "org/m", "--push", "slipway:gpu", "--create-role"]
    arguments += ["--instance-type", "ml.g6e.xlarge", "--region", "eu-west-1"]
    done = _run(*arguments)
    assert done.exit_code == 0, done.output
    host = "111122223333.dkr.ecr.eu-west-1.amazonaws.com"
    assert [command for command, *_ in ran] == [
        ("docker", "login", "--username", "AWS", "--password-stdin", host),
        ("docker", "tag", "slipway:gpu", f"{host}/slipway:gpu"),
        ("docker", "push", f"{host}/slipway:gpu"),
    ]
    assert [stdin for _, stdin, _ in ran] == ["secret", None, None]
    assert ran[0][2] == ["image repository slipway"]


@pytest.mark.parametrize(("tag", "note"), [("gpu", True), ("gpu-2", False)])
def test_an_update_pushes_an_image_too_and_says_when_its_tag_is_that_of_what_runs(
    tag: str, note: bool, memory: MemoryCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, ...]] = []

    def run(command: tuple[str, ...], **more: Any) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    arguments = ["--name", "my-llm", "--model", "org/m", "--create-role", "--instance-type", "ml.g6e.xlarge"]
    assert _run("deploy", *arguments, "--push", "slipway:gpu").exit_code == 0
    ran.clear()
    done = _run("update", *arguments, "--push", f"slipway:{tag}")
    assert done.exit_code == 0, done.output
    image = f"111122223333.dkr.ecr.eu-west-1.amazonaws.com/slipway:{tag}"
    assert ran[-1] == ("docker", "push", image)
    assert ("has been pushed again, and what runs stays as it is" in done.stderr) is note
    assert done.stdout == ("my-llm is up to date\n" if note else "my-llm is updated\n")
    dry = _run("update", *arguments, "--push", "slipway:gpu", "--account", "111122223333", "--dry-run")
    assert "docker push" in dry.stderr


def test_without_docker_the_push_fails_and_everything_goes(
    memory: MemoryCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    arguments = ["deploy", "--model", "org/m", "--push", "slipway:gpu", "--create-role"]
    done = _run(*arguments, "--instance-type", "ml.g6e.xlarge", "--region", "eu-west-1")
    assert done.exit_code == 1
    assert "docker is not installed here" in done.stderr
    assert memory.names == []


def test_a_dry_run_shows_the_commands_of_a_push() -> None:
    arguments = ["deploy", "--model", "org/m", "--push", "slipway:gpu", "--role", ROLE, "--dry-run"]
    done = _run(*arguments, "--instance-type", "ml.g6e.xlarge", "--region", "eu-west-1")
    assert "docker push 111122223333.dkr.ecr.eu-west-1.amazonaws.com/slipway:gpu" in done.stderr


def test_the_policy_is_json() -> None:
    done = _run("policy", "--account", "111122223333", "--role", ROLE, "--region", "eu-west-1")
    statements = json.loads(done.stdout)["Statement"]
    assert "sagemaker:CallWithBearerToken" in statements[2]["Action"]
    assert not any("ecr:PutImage" in statement["Action"] for statement in statements)


def test_a_policy_for_nobody_is_refused_with_all_that_is_wrong() -> None:
    done = _run("policy", "--account", "abc", "--role", "admin", "--region", "eu", "--repository", "Mine")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        'slipway: account is "abc" (--account); expected twelve digits',
        'slipway: region is "eu" (--region); expected a region such as eu-west-1 (also AWS_REGION)',
        'slipway: role is "admin" (--role); expected the ARN of an IAM role, arn:aws:iam::<account>:role/<name>',
        'slipway: repository is "Mine" (--repository); expected a repository name of ECR',
    ]


def test_a_policy_may_be_for_several_roles() -> None:
    roles = "arn:aws:iam::111122223333:role/slipway-*"
    done = _run("policy", "--account", "111122223333", "--role", roles, "--region", "eu-west-1")
    assert roles in done.stdout


def test_the_policy_of_who_pushes_images_names_their_repository() -> None:
    arguments = ["--account", "111122223333", "--role", ROLE, "--region", "eu-west-1", "--repository", "mine"]
    push = json.loads(_run("policy", *arguments).stdout)["Statement"][-1]
    assert "ecr:PutImage" in push["Action"]
    assert push["Resource"] == "arn:aws:ecr:eu-west-1:111122223333:repository/mine"


def test_the_command_line_imports_no_boto3_until_it_is_needed() -> None:
    code = "import sys, deploy.cli; sys.exit('boto3' in sys.modules or 'botocore' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
