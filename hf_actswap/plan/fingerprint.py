"""What a plan's bytes and times depend on, as a plan file says it: the model and the batch.

The facts about the model are those that stay the same however it is wrapped, divided among ranks, sharded or
quantised. A fact that is not known is not compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import MaxLen

from ..config.documents import Count
from ..config.validation import Expected
from ..errors import Problem

if TYPE_CHECKING:
    from torch import nn

NOT_COMPARED = (
    "the plan does not say for which model it was made (it has no fingerprint): only the layers are compared"
)

_Text = Annotated[str, MaxLen(100), Expected("a text of at most 100 characters")]


@dataclass(frozen=True)
class Fingerprint:
    """A model and a batch; ``None`` where a fact is not known.

    Args:
        family: ``model_type`` of the configuration.
        hidden_size, intermediate_size, vocab_size, num_attention_heads, num_key_value_heads: of the model's
            configuration, or of that of its text part.
        dtype: dtype of most of the floating point weights, for example ``bfloat16``.
        trained: how much of the model is trained.
        batch_shape: shape of the input ids of one micro-batch; empty: not known.
    """

    family: _Text | None = None
    hidden_size: Count | None = None
    intermediate_size: Count | None = None
    vocab_size: Count | None = None
    num_attention_heads: Count | None = None
    num_key_value_heads: Count | None = None
    dtype: _Text | None = None
    trained: Literal["all", "a part", "nothing"] | None = None
    batch_shape: tuple[Count, ...] = ()

    def problems_of(self, model: nn.Module) -> Iterator[Problem]:
        """Yield what differs in ``model`` from the model that the plan was made for."""
        own = fingerprint_of(model)
        hint = "Make the plan anew for this model. Without its section `fingerprint` it is used as it is."
        for item in fields(self):
            made_for, here = getattr(self, item.name), getattr(own, item.name)
            if item.name != "batch_shape" and made_for != here and None not in (made_for, here):
                yield Problem(
                    f"plan.fingerprint.{item.name}", f"{here}, as in the model", f"{made_for}", hint
                )


_OF_CONFIG = (
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "num_attention_heads",
    "num_key_value_heads",
)


def fingerprint_of(model: nn.Module, batch_shape: tuple[int, ...] = ()) -> Fingerprint:
    """Return what is known about a model without wrappers, and a batch."""
    whole: Any = getattr(model, "config", None)
    config = whole.get_text_config() if hasattr(whole, "get_text_config") else whole
    sizes = {name: getattr(config, name, None) for name in _OF_CONFIG}
    known = {name: size for name, size in sizes.items() if type(size) is int}
    elements: Counter[str] = Counter()
    trained = []
    for weight in model.parameters():
        trained.append(weight.requires_grad)
        if weight.is_floating_point():
            elements[str(weight.dtype).removeprefix("torch.")] += weight.numel()
    family = getattr(whole, "model_type", None)
    return Fingerprint(
        family=family if isinstance(family, str) and family else None,
        dtype=elements.most_common(1)[0][0] if elements.total() else None,
        trained=None if not trained else "all" if all(trained) else "a part" if any(trained) else "nothing",
        batch_shape=batch_shape,
        **known,
    )
