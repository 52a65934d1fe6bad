"""`slipway deploy | update | destroy | status | template | invoke | logs`.

Exit codes: 0, success; 1, failure; 2, invalid configuration; 3, the state of the existing stack forbids the command;
130, interrupted.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Annotated, NoReturn
from urllib.parse import urlsplit

import typer

from deploy.sagemaker import endpoint
from deploy.sagemaker.aws import Aws
from deploy.sagemaker.configuration import (
    Configuration,
    ConfigurationError,
    merge_tables,
    read_configuration,
    read_file,
    read_options,
    setting_faults_of,
)
from deploy.sagemaker.ecr import PushFailed, ecr_image
from deploy.sagemaker.ecr import push as push_image
from deploy.sagemaker.instance_gpus import plan_lines
from deploy.sagemaker.model_upload import UploadFailed, files_in, upload_model
from deploy.sagemaker.stack import ChangeSet, Stack, StackConflict, StackFailed
from deploy.sagemaker.template import template as template_of
from deploy.yaml_text import as_yaml

FAILED, INVALID, CONFLICT, INTERRUPTED = 1, 2, 3, 130
_LOG_LINES = 20
_AWS_HOSTS = (".amazonaws.com", ".amazonaws.com.cn")

Name = Annotated[str, typer.Argument(help="Name of the endpoint.")]
Region = Annotated[str | None, typer.Option(help="AWS region. Default: AWS_REGION, or the region of the profile.")]
Profile = Annotated[str | None, typer.Option(help="Profile of the AWS credentials.")]
ComponentName = Annotated[
    str | None,
    typer.Option(
        "--component", help="Name of an inference component. The model's component has the name of the endpoint."
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Change nothing. Print the template, the plan of the GPUs and, if there are AWS credentials, the changes.",
    ),
]

# The options of the commands that read a configuration. Each option is a field of the configuration.
File = Annotated[Path | None, typer.Argument(help="TOML file with the configuration. Options override its fields.")]
EndpointName = Annotated[str | None, typer.Option(help="Name of the endpoint.")]
Model = Annotated[str | None, typer.Option(help="Hub id, s3:// prefix, or s3:// archive.")]
Upload = Annotated[
    str | None,
    typer.Option(help="Local directory with the model. It is first uploaded to the s3:// prefix that --model names."),
]
Image = Annotated[str | None, typer.Option(help="Image in ECR.")]
Push = Annotated[
    str | None, typer.Option(help="Local image. docker first pushes it to ECR, under the name that --image has.")
]
Role = Annotated[str | None, typer.Option(help="ARN of the execution role. Default: the stack creates a role.")]
InstanceType = Annotated[str | None, typer.Option(help="Instance type, such as ml.g6e.xlarge.")]
Env = Annotated[
    list[str] | None, typer.Option(help="NAME=VALUE: an environment variable of the container. Repeatable.")
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="FIELD=VALUE: any other field of the configuration, such as autoscaling.max=4. Repeatable."
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands to a command line."""
    for command in (deploy, update, destroy, status, invoke, logs, template):
        app.command()(_reporting_errors()(command))


@dataclass(frozen=True, slots=True)
class _Deployment:
    aws: Aws
    configuration: Configuration
    stack: Stack


def _read(
    file: Path | None,
    name: str | None,
    model: str | None,
    upload: str | None,
    image: str | None,
    push: str | None,
    role: str | None,
    instance_type: str | None,
    env: list[str] | None,
    assignments: list[str] | None,
    region: str | None,
    profile: str | None,
) -> _Deployment:
    """Read the configuration from the file and the options. The options override the file."""
    options = {
        "name": name,
        "model": model,
        "upload": upload,
        "image": image,
        "push": push,
        "role": role,
        "instance_type": instance_type,
        "env": env,
        "set": assignments,
        "region": region,
    }
    values = merge_tables(read_file(file) if file else {}, read_options(options))
    in_ecr, given = ecr_image(str(values.get("image"))), values.get("region")
    aws = Aws(given if isinstance(given, str) else None, profile, otherwise=in_ecr.region if in_ecr else None)
    values = {"region": aws.region, **values}
    configuration = read_configuration(values)
    for warning in setting_faults_of(values)[1]:
        typer.echo(f"slipway: warning: {warning}", err=True)
    return _Deployment(aws, configuration, _stack(aws, configuration.name))


def deploy(
    file: File = None,
    name: EndpointName = None,
    model: Model = None,
    upload: Upload = None,
    image: Image = None,
    push: Push = None,
    role: Role = None,
    instance_type: InstanceType = None,
    env: Env = None,
    assignments: Set = None,
    region: Region = None,
    profile: Profile = None,
    dry_run: DryRun = False,
) -> None:
    """Deploy a model to a SageMaker endpoint, with one CloudFormation stack."""
    deployment = _read(file, name, model, upload, image, push, role, instance_type, env, assignments, region, profile)
    configuration, stack = deployment.configuration, deployment.stack
    name = configuration.name
    if dry_run:
        _show(deployment, changes=False)
        return
    new = stack.ready_to_create()
    change = stack.propose(configuration)
    if change and not new:
        stack.discard(change)
        raise _differs(name, change)
    _carry_out(deployment, change)
    typer.echo(f"{name} is in service")
    _tell_of_old_image(configuration, change)
    way = f" --component {name}" if configuration.component else " --async" if configuration.asynchronous else ""
    where = f" --region {configuration.region}" + (f" --profile {profile}" if profile else "")
    typer.echo(f'try: slipway invoke {name}{where}{way} --prompt "Hello"', err=True)


def update(
    file: File = None,
    name: EndpointName = None,
    model: Model = None,
    upload: Upload = None,
    image: Image = None,
    push: Push = None,
    role: Role = None,
    instance_type: InstanceType = None,
    env: Env = None,
    assignments: Set = None,
    region: Region = None,
    profile: Profile = None,
    dry_run: DryRun = False,
) -> None:
    """Change a deployment to another configuration while it serves."""
    deployment = _read(file, name, model, upload, image, push, role, instance_type, env, assignments, region, profile)
    configuration, stack = deployment.configuration, deployment.stack
    if dry_run:
        _show(deployment, changes=True)
        return
    stack.check_updatable()
    change = stack.propose(configuration)
    _carry_out(deployment, change)
    typer.echo(f"{configuration.name} is {'updated' if change else 'up to date'}")
    _tell_of_old_image(configuration, change)


def template(
    file: File = None,
    name: EndpointName = None,
    model: Model = None,
    upload: Upload = None,
    image: Image = None,
    push: Push = None,
    role: Role = None,
    instance_type: InstanceType = None,
    env: Env = None,
    assignments: Set = None,
    region: Region = None,
    profile: Profile = None,
) -> None:
    """Print the CloudFormation template that `deploy` uses."""
    deployment = _read(file, name, model, upload, image, push, role, instance_type, env, assignments, region, profile)
    typer.echo(as_yaml(template_of(deployment.configuration)), nl=False)


def destroy(name: Name, region: Region = None, profile: Profile = None) -> None:
    """Delete the stack of an endpoint: the endpoint and all resources that belong to it."""
    aws = Aws(region, profile)
    stack = _stack(aws, name)
    if not stack.delete():
        typer.echo(f"slipway: the stack {stack.name} does not exist in {aws.region}", err=True)
        raise typer.Exit(1)
    typer.echo(f"{name} is removed")


def status(
    name: Name,
    region: Region = None,
    profile: Profile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of YAML.")] = False,
) -> None:
    """Show the stack, the components and the scaling of an endpoint."""
    aws = Aws(region, profile)
    stack_status = None
    with contextlib.suppress(StackConflict):  # Something other than Slipway may have created the endpoint.
        stack_status = _stack(aws, name).status()
    found = endpoint.status(aws, name, stack_status)
    typer.echo(json.dumps(found, indent=2, default=str) if as_json else as_yaml(found).rstrip())


def invoke(
    name: Name,
    prompt: Annotated[str, typer.Option(help="Prompt.")] = "",
    stream: Annotated[bool, typer.Option("--stream", help="Print the answer while it is generated.")] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as a chat.")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens in the answer.")] = 256,
    component: ComponentName = None,
    body: Annotated[str | None, typer.Option(help="Body of the request as JSON, in place of a prompt.")] = None,
    route: Annotated[
        str | None, typer.Option(help="Route of the container that answers, such as /generate. Default: /invocations.")
    ] = None,
    asynchronous: Annotated[
        bool, typer.Option("--async", help="Call an asynchronous endpoint, and wait until S3 has the answer.")
    ] = False,
    wait: Annotated[int, typer.Option(min=0, help="Maximum seconds to wait for the answer with --async.")] = 900,
    input_location: Annotated[
        str | None,
        typer.Option(
            help="s3:// object with the request, for an asynchronous endpoint. Without --async, only the location of "
            "the answer is printed."
        ),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="API key, for a server other than AWS that requires API keys.")
    ] = None,
    region: Region = None,
    profile: Profile = None,
) -> None:
    """Send a request to an endpoint. AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME names a server other than AWS."""
    if not (prompt or body or input_location):
        raise ConfigurationError("--prompt: missing; expected a text (or give --body, or --input-location)")
    if route is not None and not route.startswith("/"):
        raise ConfigurationError(f"--route: expected a path such as /generate, got {route}")
    from_prompt = endpoint.body(prompt, max_new_tokens=max_new_tokens, chat=chat, stream=stream)
    # Bytes on the command line that are not UTF-8 are sent unchanged.
    request = body.encode(errors="surrogateescape") if body else from_prompt
    aws = Aws(region, profile)
    runtime = aws.client("sagemaker-runtime", attempts=1, key=api_key)  # A retry would generate a second answer.
    if api_key is not None and (urlsplit(runtime.meta.endpoint_url).hostname or "").endswith(_AWS_HOSTS):
        raise ConfigurationError("--api-key: AWS takes no key; expected AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME of a server")
    if asynchronous or input_location:
        _check_asynchronous(request, input_location, stream, component)
        places = endpoint.invoke_asynchronously(runtime, name, request=request, location=input_location, route=route)
        s3 = aws.client("s3", url=places.s3, key=api_key if places.s3 else None)
        typer.echo(endpoint.wait_for_answer(s3, places, wait) if asynchronous else places.output)
        return
    if not stream:
        typer.echo(endpoint.invoke(runtime, name, request, component, route))
        return
    try:
        for piece in endpoint.invoke_stream(runtime, name, request, component, route):
            typer.echo(piece, nl=False)
    finally:
        typer.echo()


def _check_asynchronous(request: bytes, location: str | None, stream: bool, component: str | None) -> None:
    if stream or component:
        option = "--stream" if stream else "--component"
        raise ConfigurationError(f"{option}: not possible with asynchronous calls; expected none")
    if location is None and len(request) > endpoint.INLINE_BYTES:
        raise ConfigurationError(
            f"the request has {len(request)} bytes; expected at most {endpoint.INLINE_BYTES}, or an S3 object that "
            "--input-location names"
        )


def logs(
    name: Name,
    since: Annotated[
        int, typer.Option(min=1, help="Number of minutes up to now from which log records are shown.")
    ] = 60,
    component: ComponentName = None,
    region: Region = None,
    profile: Profile = None,
) -> None:
    """Show the logs of the containers of an endpoint."""
    client = Aws(region, profile).client("logs")
    start = int((time.time() - since * 60) * 1000)
    for _, line in endpoint.log_lines(client, endpoint.log_group(name, component), start):
        typer.echo(line)


def _stack(aws: Aws, name: str) -> Stack:
    return Stack(aws.client("cloudformation"), name, _progress())


def _show(deployment: _Deployment, *, changes: bool) -> None:
    """Print the template, the planned uploads, the GPUs and, if there are AWS credentials, CloudFormation's changes.

    Args:
        changes: Whether the command changes an existing stack, instead of creating one.

    Raises:
        StackConflict: The command would be refused.
        UploadFailed: The upload would fail.
    """
    from botocore.exceptions import BotoCoreError

    configuration, stack = deployment.configuration, deployment.stack
    typer.echo(as_yaml(template_of(configuration)), nl=False)
    if configuration.push:
        typer.echo(f"{configuration.push} would be pushed as {configuration.image}", err=True)
    if configuration.upload:
        count = len(files_in(Path(configuration.upload)))
        typer.echo(f"{configuration.upload} ({count} files) would be uploaded to {configuration.model}", err=True)
    for line in plan_lines(configuration, reads_s3=deployment.aws.has_credentials):
        typer.echo(line, err=True)
    if not deployment.aws.has_credentials:
        typer.echo("slipway: note: no change set, because AWS credentials are missing", err=True)
        return
    there = False
    try:
        there = stack.status() is not None
        if there or changes:
            stack.check_updatable()
        change = stack.propose(configuration)
    except BotoCoreError as error:
        typer.echo(f"slipway: note: no change set: {error}", err=True)
        return
    except StackConflict as error:
        if changes or not there:
            raise
        # `deploy` may not be refused: it waits until a running operation has finished, and deletes the remains of a
        # failed creation.
        typer.echo(f"slipway: note: no change set: {error}", err=True)
        return
    if change is None:
        typer.echo("nothing would change", err=True)
        return
    typer.echo("a new stack:" if change.creates else "changes:", err=True)
    for each in change.changes:
        replaced = f", replaced: {each['Replacement']}" if "Replacement" in each else ""
        typer.echo(f"  {each['Action']} {each['LogicalResourceId']} ({each['ResourceType']}){replaced}", err=True)
    stack.discard(change)
    if there and not changes:
        raise _differs(configuration.name, change)


def _differs(name: str, change: ChangeSet) -> StackConflict:
    differing = ", ".join(each["LogicalResourceId"] for each in change.changes) or "its tags"
    return StackConflict(f"{name} exists and differs in {differing}; run `slipway update` to change it")


def _tell_of_old_image(configuration: Configuration, change: ChangeSet | None) -> None:
    if not change and (configuration.push or configuration.upload):
        typer.echo(
            "slipway: note: the endpoint still runs the old image and model, because their names did not change: give "
            "the image another tag, or the model another prefix, to roll it out",
            err=True,
        )


def _carry_out(deployment: _Deployment, change: ChangeSet | None) -> None:
    """Push the image, upload the model, and then change the stack. If a container fails, show the end of its log."""
    aws, configuration, stack = deployment.aws, deployment.configuration, deployment.stack
    report, begun = _progress(), time.time()
    try:
        if configuration.push:
            push_image(aws.client("ecr"), configuration.push, configuration.image, report)
        if configuration.upload:
            upload_model(aws.client("s3"), Path(configuration.upload), configuration.model, report)
    except BaseException:
        if change:
            stack.discard(change)
        raise
    if not change:
        return
    try:
        stack.carry_out(change)
    except StackFailed as error:
        if error.started:
            _show_log(aws, configuration, begun)
        raise


def _show_log(aws: Aws, configuration: Configuration, since: float) -> None:
    from botocore.exceptions import BotoCoreError, ClientError

    name = configuration.name
    group = endpoint.log_group(name, name if configuration.component else None)
    try:
        lines = sorted(endpoint.log_lines(aws.client("logs"), group, int(since * 1000)), key=itemgetter(0))
        shown = [line for _, line in lines[-_LOG_LINES:]]
    except (endpoint.NoLog, BotoCoreError, ClientError) as error:
        shown = [f"({error})"]
    for line in shown:
        typer.echo(f"  log: {line}", err=True)


def _progress() -> Callable[[str], None]:
    """Return a function that writes lines to standard error, prefixed with the seconds since this call.

    On a terminal, failures are red.
    """
    start = time.monotonic()

    def report(line: str) -> None:
        color = typer.colors.RED if "_FAILED" in line else None
        typer.secho(f"[{time.monotonic() - start:6.0f} s] {line}", fg=color, err=True)

    return report


@contextlib.contextmanager
def _reporting_errors() -> Iterator[None]:
    """Print each error as one line, without a traceback, and exit with the error's exit code."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # A CI system cancels a job with SIGTERM.
    try:
        yield
    except ConfigurationError as error:
        _end(INVALID, *error.problems)
    except StackConflict as error:
        _end(CONFLICT, str(error))
    except (
        StackFailed,
        PushFailed,
        UploadFailed,
        endpoint.NoAnswer,
        endpoint.NoLog,
        endpoint.StreamBroken,
        BotoCoreError,
        Boto3Error,
        ClientError,
    ) as error:
        # A message may have several lines, because it may quote a container's answer or list several problems.
        _end(FAILED, " ".join(str(error).split()))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _end(code: int, *problems: str) -> NoReturn:
    for problem in problems:
        typer.echo(f"slipway: {problem}", err=True)
    sys.exit(code)
