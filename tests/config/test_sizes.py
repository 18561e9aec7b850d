"""Sizes and devices as people write them."""

from __future__ import annotations

import pytest

from hf_actswap.config.sizes import DEVICE_KINDS, bytes_of, device_kind, own_device, tokens_of


def test_bytes() -> None:
    written = {"40GB": 40 * 10**9, "24GiB": 24 * 2**30, "24": 24 * 2**30, " 0.5 tib": 2**39, "512MiB": 2**29}
    assert {text: bytes_of(text) for text in written} == written
    for wrong in ("", "GB", "-1", "0", "40 G", "1e3", "40GB free"):
        with pytest.raises(ValueError, match="is not a size such as 40GB"):
            bytes_of(wrong)


def test_tokens() -> None:
    written = {"8192": 8192, "8k": 8192, "128K": 131_072, "0.5k": 512, "1m": 2**20}
    assert {text: tokens_of(text) for text in written} == written
    for wrong in ("", "k", "0", "8.5", "8kb", "-8k"):
        with pytest.raises(ValueError, match="is not a whole number of tokens"):
            tokens_of(wrong)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("h200", "H200"),
        ("A100", "A100-80"),
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("A100 40GB", "A100-40"),
        ("a100-40", "A100-40"),
        ("NVIDIA B200", "B200"),
        ("L40S", "L40S"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("rtx4090", "RTX 4090"),
        ("4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 3090 Ti", "RTX 3090"),
        ("NVIDIA GeForce RTX 5090", "RTX 5090"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("A6000", "RTX A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", None),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("H100 80GB PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA GeForce RTX 5090 D", None),
        ("AMD Instinct MI300X", "MI300X"),
        ("CPU", "cpu"),
        ("H20", None),
        ("NVIDIA GH200 480GB", None),
        ("L40", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("A10", None),
    ],
)
def test_devices_by_usual_names(name: str, kind: str | None) -> None:
    assert device_kind(name) == kind


def test_each_kind_is_its_own_name() -> None:
    assert [device_kind(kind) for kind in DEVICE_KINDS] == list(DEVICE_KINDS)


def test_a_device_of_ones_own() -> None:
    found = own_device("memory=48GB, tflops=150, bandwidth=0.9, link=25")
    assert found == {"memory": 48e9, "tflops": 150, "bandwidth": 0.9, "link": 25}
    for wrong in (
        "memory=48GB",
        "memory=48GB,tflops=x,bandwidth=1,link=1",
        "memory=1,tflops=0,bandwidth=1,link=1",
    ):
        with pytest.raises(ValueError, match="form"):
            own_device(wrong)
