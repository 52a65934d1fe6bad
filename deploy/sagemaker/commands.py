"""`slipway deploy | update | destroy | status | invoke | logs | template | policy`."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated, Optional

import typer

from deploy.sagemaker import options as given
from deploy.sagemaker.command_run import FAILED, IN_THE_WAY, cloud_of, reported_errors, surroundings
from deploy.sagemaker.deploy_commands import deploy, template, update

Endpoint = Annotated[str, typer.Argument(help="Name of the endpoint.")]


def register(app: typer.Typer) -> None:
    """Add the commands to a command line."""
    for command in (deploy, update, destroy, status, invoke, logs, template, policy):
        app.command()(command)


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
    with reported_errors():
        from deploy.sagemaker.destroy import destroy as remove_all

        around = surroundings(cloud_of(region, profile))
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
    with reported_errors():
        from deploy.sagemaker import status as looking

        found = looking.status(cloud_of(region, profile), name)
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
    with reported_errors():
        from deploy.sagemaker import invoke as asking

        if not (prompt or body or input_location):
            raise given.WrongOption("--prompt: missing; expected a text (or --body, or --input-location)")
        cloud = cloud_of(region, profile)
        if input_location:
            typer.echo(asking.invoke_asynchronously(cloud, name, input_location))
            return
        made = asking.body(prompt, max_new_tokens=max_new_tokens, chat=chat, stream=stream)
        # What was no UTF-8 in the shell goes out as it was.
        request = body.encode(errors="surrogateescape") if body else made
        if not stream:
            typer.echo(asking.invoke(cloud, name, request, component))
            return
        try:
            for text in asking.texts(asking.invoke_stream(cloud, name, request, component)):
                typer.echo(text, nl=False)
        except asking.StreamBroken:
            typer.echo()
            raise
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
    with reported_errors():
        from deploy.sagemaker import logs as reading
        from deploy.sagemaker.progress import RealClock

        cloud = cloud_of(region, profile)
        group = reading.group_of_component(component) if component else reading.group_of_endpoint(name)
        start = int((time.time() - since * 60) * 1000)
        lines = reading.follow(cloud, group, start, RealClock()) if follow else reading.read(cloud, group, start)
        for line in lines:
            typer.echo(str(line))


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
    with reported_errors():
        from deploy.sagemaker.configuration_reader import check_caller
        from deploy.sagemaker.policies import caller_policy, push_policy

        check_caller({"account": account, "role": role, "region": region, "repository": repository})
        document = caller_policy(account, region, role)
        if repository:
            document["Statement"] += push_policy(account, region, repository)["Statement"]
        typer.echo(json.dumps(document, indent=2))
