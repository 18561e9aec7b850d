"""``hf-actswap push``: publish a configuration, and a plan beside it, on the Hub."""

from __future__ import annotations

from typing import Annotated

import typer

from ..config import load_config
from ..config.documents import JsonDocument, read_text
from ..config.hub import MAX_PLAN_BYTES, PLAN_FORMAT, PLAN_FORMAT_VERSION
from ..errors import ActSwapError, PlanError, Problem
from ..plan import load_plan
from . import options
from .output import Answer, answer

_EXPECTED = "a configuration; a plan stands beside one: push CONFIG REPO_ID --plan FILE"


class PushError(ActSwapError):
    """Nothing was published."""

    subject = "publication"


def push(
    config: options.Config,
    repo_id: Annotated[
        str, typer.Argument(metavar="REPO_ID", help="org/name; created if it does not exist.")
    ],
    plan: Annotated[str | None, typer.Option(metavar="FILE", help="A plan to publish with it.")] = None,
    base_model: Annotated[
        str | None, typer.Option(metavar="ID", help="Hub id of its model, for the card.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Create the repository as private.")] = False,
    revision: Annotated[str | None, typer.Option(metavar="BRANCH", help="Branch for the commit.")] = None,
    message: Annotated[str | None, typer.Option(metavar="TEXT", help="Message of the commit.")] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request instead.")] = False,
    as_json: options.Json = False,
) -> None:
    def ask() -> Answer:
        _reject_plan(config)
        read = load_config(config)
        if plan is not None:
            load_plan(plan)
        try:
            address = read.push_to_hub(
                repo_id,
                plan=plan,
                base_model=base_model,
                private=private or None,
                revision=revision,
                commit_message=message,
                create_pr=create_pr,
            )
        except OSError as error:
            found = " ".join(str(error).split())
            raise PushError([Problem(repo_id, "a repository that takes it", found)]) from error
        document = {"repo_id": repo_id, "commit": str(address), "with_plan": plan is not None}
        use = f'Use it with ActSwapTrainingArguments(actswap="{repo_id}").'
        return Answer(document, [f"Published: {address}", use])

    answer("push", as_json, ask)


def _reject_plan(name: str) -> None:
    """Raise `PushError` if ``name`` is a plan: training arguments ignore a repository with a plan alone."""
    try:
        JsonDocument(read_text(name, MAX_PLAN_BYTES, PlanError), "plan", PlanError).check_format(
            PLAN_FORMAT, PLAN_FORMAT_VERSION
        )
    except (OSError, PlanError):
        return
    raise PushError([Problem("CONFIG", _EXPECTED, f"'{name}', a plan")])
