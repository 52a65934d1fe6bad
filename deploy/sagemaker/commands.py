"""`slipway deploy | update | destroy | status | template | invoke | logs`.

Exit codes: 0, it is done; 1, it failed; 2, the configuration is wrong; 3, the stack that exists does not allow it; 130,
interrupted.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from deploy.sagemaker import endpoint
from deploy.sagemaker.aws import Aws
from deploy.sagemaker.configuration import (
    Configuration,
    ConfigurationError,
    laid_over,
    read_configuration,
    read_file,
    read_options,
)
from deploy.sagemaker.stack import ChangeSet, Conflict, Failed, Stack
from deploy.sagemaker.template import as_yaml
from deploy.sagemaker.template import template as template_of
from deploy.sagemaker.uploads import UploadFailed, ecr_image, upload_model
from deploy.sagemaker.uploads import push as push_image

FAILED, WRONG, CONFLICT, INTERRUPTED = 1, 2, 3, 130
_LOG_LINES = 20

Name = Annotated[str, typer.Argument(help="Name of the endpoint.")]
Region = Annotated[str | None, typer.Option(help="By default AWS_REGION or the profile's.")]
Profile = Annotated[str | None, typer.Option(help="Profile of the AWS credentials.")]
OfComponent = Annotated[
    str | None, typer.Option("--component", help="Inference component: the model's is named like the endpoint.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the template and, with credentials, what would change.")]


def register(app: typer.Typer) -> None:
    """Add the commands to a command line."""
    for command in (_configured(deploy), _configured(update), destroy, status, invoke, logs, _configured(template)):
        app.command()(_errors_in_words()(command))


@dataclass(frozen=True, slots=True)
class _Deployment:
    aws: Aws
    configuration: Configuration
    stack: Stack


def _read(
    file: Annotated[
        Path | None, typer.Argument(help="TOML file with the configuration; options go before what it says.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the endpoint.")] = None,
    model: Annotated[str | None, typer.Option(help="Hub id, or an s3:// prefix or archive.")] = None,
    upload: Annotated[
        str | None, typer.Option(help="Local directory to upload first, to the s3:// prefix that is the model.")
    ] = None,
    image: Annotated[str | None, typer.Option(help="Image in ECR.")] = None,
    push: Annotated[str | None, typer.Option(help="Local image to push first, as the image, with docker.")] = None,
    role: Annotated[str | None, typer.Option(help="ARN of the execution role; by default one is made.")] = None,
    instance_type: Annotated[str | None, typer.Option(help="Such as ml.g6e.xlarge.")] = None,
    env: Annotated[list[str] | None, typer.Option(help="NAME=VALUE for the container; repeatable.")] = None,
    set: Annotated[
        list[str] | None,
        typer.Option(help="Any other field as FIELD=VALUE in TOML, such as autoscaling.max=4; repeatable."),
    ] = None,
    region: Region = None,
    profile: Profile = None,
) -> _Deployment:
    options = dict(locals())
    del options["file"], options["profile"]
    values = laid_over(read_file(file) if file else {}, read_options(options))
    in_ecr, given = ecr_image(str(values.get("image"))), values.get("region")
    aws = Aws(given if isinstance(given, str) else None, profile, otherwise=in_ecr.region if in_ecr else None)
    configuration = read_configuration({"region": aws.region, **values})
    return _Deployment(aws, configuration, _stack(aws, configuration.name))


def _configured(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the options of `_read`, which give its first argument, before its own."""
    shared = inspect.signature(_read, eval_str=True).parameters
    _, *own = inspect.signature(command, eval_str=True).parameters.values()

    @functools.wraps(command)
    def run(**options: Any) -> None:
        deployment = _read(**{name: options.pop(name) for name in shared})
        command(deployment, **options)

    run.__dict__["__signature__"] = inspect.Signature([*shared.values(), *own])
    return run


def deploy(deployment: _Deployment, dry_run: DryRun = False) -> None:
    """Deploy a model to a SageMaker endpoint, with one CloudFormation stack."""
    configuration, stack = deployment.configuration, deployment.stack
    name = configuration.name
    if dry_run:
        _show(deployment)
        return
    new = stack.ready_to_create()
    change = stack.propose(configuration)
    if change and not new:
        stack.discard(change)
        differing = ", ".join(each["LogicalResourceId"] for each in change.changes) or "its tags"
        raise Conflict(f"{name} exists and differs in {differing}; run `slipway update` to change it")
    _carry_out(deployment, change)
    typer.echo(f"{name} is in service")
    component = f" --component {name}" if configuration.component else ""
    typer.echo(f'try: slipway invoke {name}{component} --prompt "Hello"', err=True)


def update(deployment: _Deployment, dry_run: DryRun = False) -> None:
    """Bring a deployment to another configuration while it serves."""
    configuration, stack = deployment.configuration, deployment.stack
    if dry_run:
        _show(deployment)
        return
    stack.check_updatable()
    change = stack.propose(configuration)
    _carry_out(deployment, change)
    typer.echo(f"{configuration.name} is {'updated' if change else 'up to date'}")
    if not change and (configuration.push or configuration.upload):
        typer.echo(
            "slipway: note: what was sent has the name of what runs, which was not replaced: give the image another "
            "tag, or the model another prefix, to have it rolled out",
            err=True,
        )


def template(deployment: _Deployment) -> None:
    """Print the CloudFormation template that `deploy` makes."""
    typer.echo(as_yaml(template_of(deployment.configuration)), nl=False)


def destroy(name: Name, region: Region = None, profile: Profile = None) -> None:
    """Remove an endpoint and all that belongs to it: delete its stack."""
    stack = _stack(Aws(region, profile), name)
    removed = stack.delete()
    typer.echo(f"{name} is removed" if removed else f"nothing to remove: there is no stack {stack.name}")


def status(
    name: Name,
    region: Region = None,
    profile: Profile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of YAML.")] = False,
) -> None:
    """Show an endpoint's stack, components and scaling."""
    aws = Aws(region, profile)
    of_stack = None
    with contextlib.suppress(Conflict):  # an endpoint that something else has made is shown as well
        of_stack = _stack(aws, name).status()
    found = endpoint.status(aws, name, of_stack)
    typer.echo(json.dumps(found, indent=2, default=str) if as_json else as_yaml(found).rstrip())


def invoke(
    name: Name,
    prompt: Annotated[str, typer.Option(help="The prompt.")] = "",
    stream: Annotated[bool, typer.Option("--stream", help="Print the answer as it comes.")] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Ask in a chat's form.")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    component: OfComponent = None,
    body: Annotated[str | None, typer.Option(help="The request's JSON, instead of a prompt.")] = None,
    input_location: Annotated[
        str | None, typer.Option(help="s3:// request of an asynchronous endpoint; prints where the answer is.")
    ] = None,
    region: Region = None,
    profile: Profile = None,
) -> None:
    """Ask an endpoint; AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME names another than AWS's."""
    if not (prompt or body or input_location):
        raise ConfigurationError("--prompt: missing; expected a text (or --body, or --input-location)")
    runtime = Aws(region, profile).client("sagemaker-runtime")
    if input_location:
        typer.echo(endpoint.invoke_asynchronously(runtime, name, input_location))
        return
    made = endpoint.body(prompt, max_new_tokens=max_new_tokens, chat=chat, stream=stream)
    # What was no UTF-8 in the shell goes out as it was.
    request = body.encode(errors="surrogateescape") if body else made
    if not stream:
        typer.echo(endpoint.invoke(runtime, name, request, component))
        return
    try:
        for piece in endpoint.invoke_stream(runtime, name, request, component):
            typer.echo(piece, nl=False)
    finally:
        typer.echo()


def logs(
    name: Name,
    since: Annotated[int, typer.Option(min=1, help="Minutes back.")] = 60,
    component: OfComponent = None,
    region: Region = None,
    profile: Profile = None,
) -> None:
    """Show what the containers of an endpoint log."""
    client = Aws(region, profile).client("logs")
    start = int((time.time() - since * 60) * 1000)
    for _, line in endpoint.log_lines(client, endpoint.log_group(name, component), start):
        typer.echo(line)


def _stack(aws: Aws, name: str) -> Stack:
    return Stack(aws.client("cloudformation"), name, _teller())


def _show(deployment: _Deployment) -> None:
    """The template and what would be sent; and with credentials, what CloudFormation would change."""
    from botocore.exceptions import BotoCoreError

    configuration, stack = deployment.configuration, deployment.stack
    template(deployment)
    if configuration.push:
        typer.echo(f"{configuration.push} would be pushed as {configuration.image}", err=True)
    if configuration.upload:
        typer.echo(f"{configuration.upload} would be uploaded to {configuration.model}", err=True)
    if not deployment.aws.has_credentials:
        typer.echo("slipway: note: no change set, as there are no AWS credentials", err=True)
        return
    try:
        if stack.status() is not None:
            stack.check_updatable()
        change = stack.propose(configuration)
    except (Conflict, BotoCoreError) as error:
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


def _carry_out(deployment: _Deployment, change: ChangeSet | None) -> None:
    """Push, upload and then change the stack; where a container does not start, show the end of its log."""
    aws, configuration, stack = deployment.aws, deployment.configuration, deployment.stack
    tell, begun = _teller(), time.time()
    try:
        if configuration.push:
            push_image(aws.client("ecr"), configuration.push, configuration.image, tell)
        if configuration.upload:
            upload_model(aws.client("s3"), Path(configuration.upload), configuration.model, tell)
    except BaseException:
        if change:
            stack.discard(change)
        raise
    if not change:
        return
    try:
        stack.carry_out(change)
    except Failed as error:
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


def _teller() -> Callable[[str], None]:
    """Writes lines to standard error, with the seconds since the start; what failed is red on a terminal."""
    start = time.monotonic()

    def tell(line: str) -> None:
        color = typer.colors.RED if "_FAILED" in line else None
        typer.secho(f"[{time.monotonic() - start:6.0f} s] {line}", fg=color, err=True)

    return tell


@contextlib.contextmanager
def _errors_in_words() -> Iterator[None]:
    """Say what went wrong in one line for each problem, and end with its exit code; never with a traceback."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # with which a CI system cancels a job
    try:
        yield
    except ConfigurationError as error:
        _end(WRONG, *error.problems)
    except Conflict as error:
        _end(CONFLICT, str(error))
    except (
        Failed,
        UploadFailed,
        endpoint.NoLog,
        endpoint.StreamBroken,
        BotoCoreError,
        Boto3Error,
        ClientError,
    ) as error:
        # A message may quote a container's answer, or list several problems.
        _end(FAILED, " ".join(str(error).split()))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _end(code: int, *problems: str) -> NoReturn:
    for problem in problems:
        typer.echo(f"slipway: {problem}", err=True)
    sys.exit(code)
