"""Reads and writes profiles in files, from ``hf-actswap profile`` or from the folder of a training.

The format is the planner's (`planner.profile`), with a key ``made_for``: for which model and step the profile
was made, and how many layers were measured. A training's profile has no such key: then only family, layers,
module names and batch are compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypedDict

from ..config.documents import Count, JsonDocument, read_text, write_whole
from ..config.sizes import device_kind
from ..errors import ActSwapError, PlanError, Problem
from ..planner.profile import Profile, profile_from_document, profile_to_json
from .options import AskedStep, AutocastName, OptimizerName
from .step import StepShape
from .subject import AnalysedModel

_MAX_BYTES = 64 * 2**20
"""Ten times the largest profile so far, of a model with many experts, each with its own ops."""

_AGAIN = "Record it anew: hf-actswap profile."


class _ModelFacts(TypedDict, total=False):
    family: str
    num_layers: int
    parameters: int
    dtype: str
    tensor_parallel_size: int


class _StepFacts(TypedDict, total=False):
    seq: Count
    autocast: AutocastName | None
    optimizer: OptimizerName | None


class ProfileOrigin(TypedDict, total=False):
    """The value of ``made_for`` in a profile's file: the keys of it that are read back."""

    model: _ModelFacts
    step: _StepFacts
    measured_layers: Count


class ProfileError(ActSwapError):
    """A file that is missing or too large, or a profile of another model or step than the one asked for."""

    subject = "profile"


@dataclass(frozen=True)
class ProfileFile:
    """A profile that was read."""

    path: str
    profile: Profile
    made_for: ProfileOrigin  # empty: the file does not say it

    @property
    def measured_layers(self) -> int:
        """How many layers' times were measured."""
        if self.profile.source != "measured":
            return 0
        return self.made_for.get("measured_layers", self.profile.num_layers)

    def described(self) -> str:
        """Return a sentence that says how the times were obtained."""
        measured, layers = self.measured_layers, self.profile.num_layers
        if not measured:
            return f"Times are those of {self.path}, computed from shapes and the device's rates."
        some = f", on {measured} of {layers} layers" if measured < layers else ""
        return f"Times were measured on {self.profile.device}{some}: {self.path}."

    def step(self, asked: AskedStep) -> StepShape:
        """Return the step of which this is the profile; the options for the step must not differ from it.

        A training's profile says only batch and device.

        Raises:
            ProfileError: names every difference.
        """
        sequences, tokens = (*self.profile.batch_shape, 0, 0)[:2]
        made = self.made_for.get("step", {})
        tokens = made.get("seq", tokens)  # the shape is that of sounds, where these are read
        own = StepShape(sequences, tokens, self.profile.device, made.get("autocast"), made.get("optimizer"))
        problems = [
            Problem(f"{self.path}: {what}", str(wanted), str(has), f"Remove {option}, or record it anew.")
            for what, option, wanted, has in (
                ("sequences of a batch", "--batch", asked.sequences, own.sequences),
                ("tokens of a sequence", "--seq", asked.tokens, own.tokens),
                ("tokens of a target sequence", "--target-seq", asked.target_tokens, own.label_tokens),
                ("mixed precision", "--autocast", asked.autocast, own.autocast),
                ("optimizer", "--optimizer", asked.optimizer, own.optimizer),
            )
            if wanted is not None and wanted != has
        ]
        kind = asked.device and (device_kind(asked.device) or asked.device)
        if asked.device and kind != (device_kind(own.device) or own.device):
            hint = "Remove --device, or record it anew on that device."
            problems.append(Problem(f"{self.path}: device", asked.device, own.device, hint))
        if problems:
            raise ProfileError(problems)
        return own

    def check(self, found: AnalysedModel) -> None:
        """Raise `ProfileError` if the profile is of another model, with every difference."""
        if problems := [*self._differs(found)]:
            raise ProfileError(problems)

    def _differs(self, found: AnalysedModel) -> Iterator[Problem]:
        model, wanted = self.made_for.get("model", {}), found.document()
        own: dict[str, object] = {
            "family": self.profile.family,
            "num_layers": self.profile.num_layers,
            "tensor_parallel_size": 1,
            **model,
        }
        for key in _ModelFacts.__annotations__:
            if key in own and own[key] != wanted[key]:
                yield Problem(f"{self.path}: {key}", str(wanted[key]), str(own[key]), _AGAIN)
        if own["num_layers"] != wanted["num_layers"] or model:
            return
        for layer, modules in zip(found.shape.layers, self.profile.saved.modules.values(), strict=True):
            strange = sorted(modules - {"", *(op.path for op in layer.ops)})
            if strange:
                where, few = f"{self.path}: layer {layer.index}", ", ".join(strange[:3])
                yield Problem(where, "modules of this model", few, _AGAIN)
                return


def write_profile(
    path: str, profile: Profile, found: AnalysedModel, step: StepShape, measured_layers: int
) -> None:
    """Write a profile, and for what it was made; the whole file is written or nothing.

    Raises:
        OSError: the file cannot be written.
    """
    made_for = {"model": found.document(), "step": step.document(), "measured_layers": measured_layers}
    text = profile_to_json(profile)
    write_whole(path, f'{{\n"made_for":{json.dumps(made_for)},\n{text.removeprefix("{").lstrip()}')


def read_profile(path: str) -> ProfileFile:
    """Read a file that `write_profile` or a training has written.

    Raises:
        ProfileError: the file cannot be read.
        PlanError: it is no profile, or malformed.
    """
    try:
        text = read_text(path, _MAX_BYTES, ProfileError)
    except OSError as error:
        expected = "a file that `hf-actswap profile --output` has written"
        raise ProfileError([Problem(path, expected, error.strerror or str(error))]) from None
    document = JsonDocument(text, "profile", PlanError, path)
    made_for: ProfileOrigin = {}
    if "made_for" in document.content:
        made_for = document.read(ProfileOrigin, "made_for")
    return ProfileFile(path, profile_from_document(document), made_for)
