"""The engine: fates of saved tensors carried out on a running model. Knows tensors and streams, no YAML."""

from __future__ import annotations

from .install import AppliedPlan, install
from .stats import SwapStats
from .transfer import BlockingTransfer, RecordingTransfer, Transfer
from .transfer_streams import StreamTransfer

__all__ = [
    "AppliedPlan",
    "BlockingTransfer",
    "RecordingTransfer",
    "StreamTransfer",
    "SwapStats",
    "Transfer",
    "install",
]
