"""Benchmarks. Not part of the installed package; see `README.md` here.

Importing this package sets environment variables that PyTorch reads, unless they are set already. So all rows
and all tests on an accelerator run under the same settings. Import it before PyTorch.
"""

from __future__ import annotations

import os

SETTINGS = {
    # Memory that swap frees and allocates again must not fragment.
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    # Without a workspace of fixed size matrix products may differ in their last bits from stream to stream,
    # and PyTorch's deterministic mode does not run them.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}

REPORTS_VARIABLE = "HF_ACTSWAP_REPORTS"
"""Environment variable with the file descriptor to which `tests/row_reports.py` reports."""
SETTLED_VARIABLE = "HF_ACTSWAP_SETTLED"
TEST_LIMIT_VARIABLE = "HF_ACTSWAP_TEST_LIMIT_S"

for _name, _value in SETTINGS.items():
    os.environ.setdefault(_name, _value)
