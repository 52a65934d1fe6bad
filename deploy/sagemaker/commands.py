"""`slipway deploy | update | destroy | status | invoke | logs | template | policy`.

Exit codes: 0, it is done; 1, it failed; 2, the configuration is wrong; 3, what is there stands in the way; 130,
interrupted.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from deploy.sagemaker import options as given

if TYPE_CHECKING:
    from deploy.sagemaker.aws import AwsCloud
    from deploy.sagemaker.executor import Failed
    from deploy.sagemaker.preparation import Prepared
    from deploy.sagemaker.presence import Surroundings

FAILED, WRONG, IN_THE_WAY, INTERRUPTED = 1, 2, 3, 130

Endpoint = Annotated[str, typer.Argument(help="Name of the endpoint.")]


def register(app: typer.Typer) -> None:
    """Add the commands to a command line."""
    for command in (deploy, update, destroy, status, invoke, logs, template, policy):
        app.command()(command)


def deploy(
    file: given.File = None,
    name: given.Name = None,
    model: given.Model = None,
    image: given.Image = None,
    role: given.Role = None,
    create_role: given.CreateRole = False,
    instance_type: given.InstanceType = None,
    instances: given.Instances = None,
    env: given.Env = None,
    tag: given.Tag = None,
    push: given.Push = None,
    account: given.Account = None,
    setting: given.Setting = None,
    region: given.Region = None,
    profile: given.Profile = None,
    dry_run: given.DryRun = False,
    rollback: Annotated[bool, typer.Option(help="Remove what was made if anything fails.")] = True,
    check: Annotated[bool, typer.Option(help="Check the execution role first.")] = True,
) -> None:
    """Deploy a model to a SageMaker endpoint; run again, it goes on where it was interrupted."""
    plain: given.Plain = {"name": name, "model": model, "image": image, "role": role, "create_role": create_role}
    plain |= {"instance_type": instance_type, "instances": instances, "push": push, "account": account}
    with _errors():
        cloud = None if dry_run else _cloud(region, profile, file)
        prepared = _prepared(file, given.overrides(plain, env, tag, setting), region, cloud)
        if cloud is None:
            _show(prepared)
            return
        _deploy(cloud, prepared, rollback=rollback, check=check)


def update(
    file: given.File = None,
    name: given.Name = None,
    model: given.Model = None,
    image: given.Image = None,
    role: given.Role = None,
    create_role: given.CreateRole = False,
    instance_type: given.InstanceType = None,
    instances: given.Instances = None,
    env: given.Env = None,
    tag: given.Tag = None,
    account: given.Account = None,
    setting: given.Setting = None,
    region: given.Region = None,
    profile: given.Profile = None,
    dry_run: given.DryRun = False,
) -> None:
    """Bring a deployment to another configuration while it serves."""
    plain: given.Plain = {"name": name, "model": model, "image": image, "role": role, "create_role": create_role}
    plain |= {"instance_type": instance_type, "instances": instances, "account": account}
    with _errors():
        from deploy.sagemaker import update as updating

        cloud = None if dry_run else _cloud(region, profile, file)
        prepared = _prepared(file, given.overrides(plain, env, tag, setting), region, cloud)
        if cloud is None:
            calls = updating.update_calls(prepared.plan, prepared.configuration)
            typer.echo(json.dumps([call.shown() for call in calls], indent=2))
            return
        with _termination_interrupts():
            done = updating.update(_around(cloud), prepared.plan, prepared.configuration)
        typer.echo(f"{prepared.plan.name} is up to date" if not done.changed else f"{prepared.plan.name} is updated")
        for key in done.left:
            typer.echo(f"left: {key}", err=True)


def destroy(
    name: Endpoint,
    region: given.Region = None,
    profile: given.Profile = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed.")] = False,
    untagged: Annotated[bool, typer.Option("--untagged", help="Also what has the name without the tag.")] = False,
    repository: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--repository", help="Also this image repository, with its images, if it carries the tag."),
    ] = None,
) -> None:
    """Remove an endpoint and all that belongs to it, from whatever state it is in."""
    with _errors():
        from deploy.sagemaker.destroy import destroy as remove_all

        around = _around(_cloud(region, profile, None))
        done = remove_all(around, name, untagged=untagged, repository=repository, dry_run=dry_run)
        for key in done.removed:
            typer.echo(f"{'would remove' if dry_run else 'removed'}: {key}")
        for key in done.foreign:
            typer.echo(f"not of this deployment, kept: {key}", err=True)
        for key in done.left:
            typer.echo(f"left: {key}", err=True)
        if not (done.removed or done.left or done.foreign):
            typer.echo(f"there is nothing of {name}")
        if done.left:
            sys.exit(FAILED)
        if done.foreign and not done.removed:
            sys.exit(IN_THE_WAY)


def status(
    name: Endpoint,
    region: given.Region = None,
    profile: given.Profile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show an endpoint, its variants, components, scaling and alarms."""
    with _errors():
        from deploy.sagemaker import status as looking

        found = looking.status(_cloud(region, profile, None), name)
        typer.echo(json.dumps(found, indent=2) if as_json else "\n".join(looking.lines(found)))


def invoke(
    name: Endpoint,
    prompt: Annotated[str, typer.Option("--prompt", help="The prompt.")] = "",
    stream: Annotated[bool, typer.Option("--stream", help="Print the text as it comes.")] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Ask in a chat's form.")] = False,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1)] = 256,
    component: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--component", help="Inference component: the model's is named like the endpoint."),
    ] = None,
    body: Annotated[Optional[str], typer.Option("--body", help="The request's JSON, instead of a prompt.")] = None,  # noqa: UP045
    input_location: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--input-location", help="s3:// request of an asynchronous endpoint; prints where the answer is."),
    ] = None,
    region: given.Region = None,
    profile: given.Profile = None,
) -> None:
    """Ask an endpoint; AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME names another than AWS's."""
    with _errors():
        from deploy.sagemaker import invoke as asking

        if not (prompt or body or input_location):
            raise given.WrongOption("--prompt: missing; expected a text (or --body, or --input-location)")
        cloud = _cloud(region, profile, None)
        if input_location:
            typer.echo(asking.invoke_asynchronously(cloud, name, input_location))
            return
        made = asking.body(prompt, max_new_tokens=max_new_tokens, chat=chat, stream=stream)
        request = body.encode() if body else made
        if not stream:
            typer.echo(asking.invoke(cloud, name, request, component))
            return
        for text in asking.texts(asking.invoke_stream(cloud, name, request, component)):
            typer.echo(text, nl=False)
        typer.echo()


def logs(
    name: Endpoint,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until interrupted.")] = False,
    since: Annotated[int, typer.Option("--since", min=1, help="Minutes back.")] = 60,
    component: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--component", help="Inference component: the model's is named like the endpoint."),
    ] = None,
    region: given.Region = None,
    profile: given.Profile = None,
) -> None:
    """Show what the containers of an endpoint log."""
    with _errors():
        from deploy.sagemaker import logs as reading
        from deploy.sagemaker.progress import RealClock

        cloud = _cloud(region, profile, None)
        group = reading.group_of_component(component) if component else reading.group_of_endpoint(name)
        start = int((time.time() - since * 60) * 1000)
        lines = reading.follow(cloud, group, start, RealClock()) if follow else reading.read(cloud, group, start)
        for line in lines:
            typer.echo(str(line))


def template(
    file: given.File = None,
    name: given.Name = None,
    model: given.Model = None,
    image: given.Image = None,
    role: given.Role = None,
    create_role: given.CreateRole = False,
    instance_type: given.InstanceType = None,
    env: given.Env = None,
    tag: given.Tag = None,
    account: given.Account = None,
    setting: given.Setting = None,
    region: given.Region = None,
) -> None:
    """Print the same deployment as a CloudFormation template."""
    plain: given.Plain = {"name": name, "model": model, "image": image, "role": role, "create_role": create_role}
    plain |= {"instance_type": instance_type, "account": account}
    with _errors():
        from deploy.sagemaker.template import template_yaml

        prepared = _prepared(file, given.overrides(plain, env, tag, setting), region, None)
        typer.echo(template_yaml(prepared.plan, prepared.configuration), nl=False)


def policy(
    account: Annotated[str, typer.Option("--account", help="Twelve digits.")],
    role: Annotated[str, typer.Option("--role", help="ARN of the execution role.")],
    region: Annotated[str, typer.Option("--region")],
    repository: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--repository", help="Also what `deploy --push` needs, for this image repository."),
    ] = None,
) -> None:
    """Print the IAM policy that someone needs who deploys, looks, asks and removes."""
    from deploy.sagemaker.policies import caller_policy, push_policy

    document = caller_policy(account, region, role)
    if repository:
        document["Statement"] += push_policy(account, region, repository)["Statement"]
    typer.echo(json.dumps(document, indent=2))


def _show(prepared: Prepared) -> None:
    from deploy.sagemaker.images import push_script

    typer.echo(prepared.plan.shown())
    if prepared.configuration.push:
        typer.echo(push_script(prepared.configuration), err=True)


def _deploy(cloud: AwsCloud, prepared: Prepared, *, rollback: bool, check: bool) -> None:
    from deploy.sagemaker.executor import Executor
    from deploy.sagemaker.resource import REPOSITORY
    from deploy.sagemaker.role import check_role

    around, configuration = _around(cloud), prepared.configuration
    findings = check_role(cloud, configuration) if check else ()
    for finding in findings:
        typer.echo(f"slipway: {'' if finding.problem else 'note: '}{finding.text}", err=True)
    if any(finding.problem for finding in findings):
        sys.exit(WRONG)
    hooks = {resource.key: lambda: _push(cloud, prepared) for resource in prepared.plan.of(REPOSITORY)}
    with _termination_interrupts():
        Executor(around, rollback=rollback, hooks=hooks).deploy(prepared.plan)
    typer.echo(f"{prepared.plan.name} is in service")
    component = f" --component {prepared.plan.name}" if configuration.component else ""
    typer.echo(f'try: slipway invoke {prepared.plan.name}{component} --prompt "Hello"', err=True)


def _push(cloud: AwsCloud, prepared: Prepared) -> None:
    import base64

    from deploy.sagemaker.api_call import ApiCall
    from deploy.sagemaker.images import push

    answer = cloud.call(ApiCall("ecr", "get_authorization_token"))
    token = base64.b64decode(answer["authorizationData"][0]["authorizationToken"]).decode()
    push(prepared.configuration, token.partition(":")[2])


def _prepared(file: Path | None, overrides: given.Overrides, region: str | None, cloud: AwsCloud | None) -> Prepared:
    from deploy.sagemaker.preparation import prepare

    return prepare(file, overrides, region or (cloud.region if cloud else None), cloud)


def _cloud(region: str | None, profile: str | None, file: Path | None) -> AwsCloud:
    from deploy.sagemaker.aws import AwsCloud
    from deploy.sagemaker.configuration_reader import read_file

    if region is None and file is not None:
        named = read_file(file).get("region")
        region = named if isinstance(named, str) else None
    return AwsCloud(region, profile)


def _around(cloud: AwsCloud) -> Surroundings:
    from deploy.sagemaker.presence import Surroundings
    from deploy.sagemaker.progress import Progress, RealClock

    clock = RealClock()
    return Surroundings(cloud, Progress(sys.stderr, clock), clock)


@contextlib.contextmanager
def _termination_interrupts() -> Iterator[None]:
    """SIGTERM, with which a CI system cancels a job, is what Ctrl-C is."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Say what went wrong in one line for each problem, and end with its exit code; never with a traceback."""
    from botocore.exceptions import BotoCoreError, ClientError

    from deploy.sagemaker.aws import NoRegion
    from deploy.sagemaker.configuration_reader import ConfigurationError
    from deploy.sagemaker.executor import Conflict, Failed
    from deploy.sagemaker.invoke import StreamBroken
    from deploy.sagemaker.service_errors import in_words
    from deploy.sagemaker.status import NoEndpoint
    from deploy.sagemaker.template import NotInTemplates

    try:
        yield
    except ConfigurationError as error:
        _end(WRONG, *error.problems)
    except (given.WrongOption, NoRegion, NotInTemplates) as error:
        _end(WRONG, str(error))
    except Conflict as error:
        _end(IN_THE_WAY, *error.problems)
    except Failed as error:
        _end(INTERRUPTED if error.interrupted else FAILED, str(error), *_left(error))
    except (NoEndpoint, StreamBroken) as error:
        _end(FAILED, str(error))
    except (BotoCoreError, ClientError) as error:
        _end(FAILED, in_words(error))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _left(error: Failed) -> list[str]:
    return [f"left: {key}" for key in error.left] + (["`slipway destroy` removes it"] if error.left else [])


def _end(code: int, *problems: str) -> None:
    for problem in problems:
        typer.echo(f"slipway: {problem}", err=True)
    sys.exit(code)
