"""From what a command was given to a plan that can be carried out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.sagemaker.api_call import ApiCall, Cloud
from deploy.sagemaker.call_checks import violations
from deploy.sagemaker.configuration import Configuration
from deploy.sagemaker.configuration_reader import ConfigurationError, laid_over, read_configuration, read_file
from deploy.sagemaker.options import Overrides
from deploy.sagemaker.plan import Plan, plan


@dataclass(frozen=True, slots=True)
class Prepared:
    """A configuration and its plan, both checked."""

    configuration: Configuration
    plan: Plan


def prepare(path: Path | None, overrides: Overrides, region: str | None, cloud: Cloud | None) -> Prepared:
    """Read the file, lay the options over it, plan, and hold every call against the services' models.

    `region` counts where neither an option nor the file names one. `cloud` is asked for the account if nothing else
    tells it; None asks nobody.

    Raises:
        ConfigurationError: something is wrong; all that is wrong is listed.
        botocore.exceptions.ClientError: the account could not be found out.
    """
    values = read_file(path) if path else {}
    values = laid_over(values, overrides.values)
    values.setdefault("region", region)
    if cloud is not None and _needs_account(values):
        values["account"] = str(cloud.call(ApiCall("sts", "get_caller_identity"))["Account"])
    configuration = read_configuration(values, overrides.origins)
    made = plan(configuration)
    problems = tuple(problem for call in made.calls for problem in violations(call))
    if problems:
        raise ConfigurationError(problems)
    return Prepared(configuration, made)


def _needs_account(values: dict[str, Any]) -> bool:
    return not values.get("account") and not values.get("role") and bool(values.get("create_role"))
