"""Sizes and kinds of devices as people read and write them: ``8k`` tokens, ``40GB``, ``24GiB``, ``RTX 4090``.

It imports no torch, so that a wrong command line is rejected at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

GIB = 2**30
_DIGITS = 4
_MORE_THAN_ANY_DEVICE = 2**60

_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)
_BYTES = {"": GIB, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12} | {
    "kib": 2**10,
    "mib": 2**20,
    "gib": GIB,
    "tib": 2**40,
}
_TOKENS = {"": 1, "k": 2**10, "m": 2**20}

DEVICE_KINDS = {
    "H200": r"\bh200\b(?! nvl\b)",
    "H100": r"\bh100\b(?!.* (pcie|nvl)\b)",
    "A100-80": r"\ba100\b(?!.*\b40 ?g?b?\b)",
    "A100-40": r"\ba100\b.*\b40 ?g?b?\b",
    "B200": r"\bg?b200\b",
    "L40S": r"\bl40s\b",
    "RTX 4090": r"\b(rtx ?)?4090\b(?!.*laptop)",
    "RTX 3090": r"\b(rtx ?)?3090\b",
    "RTX 5090": r"\b(rtx ?)?5090\b(?! d\b|.*laptop)",
    "RTX A6000": r"\ba6000\b",
    "RTX 6000 Ada": r"\b6000 ada\b",
    "RTX PRO 6000": r"\bpro 6000 blackwell\b(?!.*max q)|^ ?(rtx )?pro 6000 ?$",
    "A10G": r"\ba10g\b",
    "A40": r"\ba40\b",
    "L4": r"\bl4\b",
    "H100 PCIe": r"\bh100\b.* pcie\b",
    "H100 NVL": r"\bh100\b.* nvl\b",
    "MI300X": r"\bmi300x\b",
    "cpu": r"^ ?cpu ?$",
}
"""Devices whose rates are known -> pattern of their usual names (NVIDIA A100-SXM4-80GB, MI300X OAM).

An A100 whose name does not say its memory counts as one with 80 GB.
"""

OWN_DEVICE_KEYS = ("memory", "tflops", "bandwidth", "link")
OWN_DEVICE = "memory=48GB,tflops=150,bandwidth=0.9,link=25"
"""How to describe any other device: its memory, half-precision TFLOP/s, TB/s of device memory, and GB/s to
the host in each direction. ``fp32``, TFLOP/s in single precision, may be added."""
_FP32 = "fp32"


def gib(size_bytes: float) -> float:
    """Return bytes in GiB."""
    return size_bytes / GIB


def gib_text(size_bytes: float, rounding: Callable[[float], float] = round) -> str:
    """Return bytes (at least 0) in GiB with four digits; ``unlimited`` for more than any device has.

    ``rounding`` is `math.ceil` for a least need, `math.floor` for a limit.
    """
    if size_bytes >= _MORE_THAN_ANY_DEVICE:
        return "unlimited"
    size = gib(size_bytes)
    decimals = 0 if size <= 0 else max(_DIGITS - 1 - math.floor(math.log10(size)), 0)
    return f"{rounding(size * 10**decimals) / 10**decimals:.{decimals}f} GiB"


def bytes_of(text: str) -> int:
    """Return a size in bytes: ``40GB`` is 40 * 10^9, ``24GiB`` 24 * 2^30, a number alone is GiB.

    Raises:
        ValueError: the text is no size, or less than one byte.
    """
    return _amount(text, _BYTES, "a size such as 40GB, 24GiB, 512MiB, or a number of GiB")


def tokens_of(text: str) -> int:
    """Return a number of tokens: ``8k`` is 8,192, as context lengths are written.

    Raises:
        ValueError: the text is no whole number above 0.
    """
    return _amount(text, _TOKENS, "a whole number of tokens such as 8192 or 8k")


def device_kind(name: str) -> str | None:
    """Return which of `DEVICE_KINDS` a name means; ``None``: none of them."""
    plain = re.sub(r"[\s_-]+", " ", name.lower())
    return next((kind for kind, pattern in DEVICE_KINDS.items() if re.search(pattern, plain)), None)


def own_device(text: str) -> dict[str, float]:
    """Return the numbers of a device that is described as in `OWN_DEVICE`: bytes, TFLOP/s, TB/s, GB/s.

    Raises:
        ValueError: a number is missing, unknown or not above 0; says which.
    """
    parts = [part.partition("=") for part in text.split(",")]
    given = {key.strip(): value.strip() for key, _, value in parts}
    wrong = sorted((set(given) - {_FP32}) ^ set(OWN_DEVICE_KEYS))
    if wrong or len(given) != len(parts):
        raise ValueError(
            f"{text!r} is not of the form {OWN_DEVICE}: see {', '.join(wrong) or 'what is twice'}"
        )
    numbers: dict[str, float] = {"memory": bytes_of(given["memory"])}
    for key in (key for key in (*OWN_DEVICE_KEYS[1:], _FP32) if key in given):
        match = _NUMBER.fullmatch(given[key])
        if match is None or match[2] or not float(match[1]):
            raise ValueError(f"{key}={given[key]} is no number above 0; the form is {OWN_DEVICE}")
        numbers[key] = float(match[1])
    return numbers


def _amount(text: str, units: dict[str, int], expected: str) -> int:
    match = _NUMBER.fullmatch(text)
    unit = None if match is None else units.get(match[2].lower())
    found = 0.0 if match is None or unit is None else float(match[1]) * unit
    if found < 1 or (units is _TOKENS and found != int(found)):
        raise ValueError(f"{text!r} is not {expected}")
    return round(found)
