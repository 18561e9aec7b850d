"""Two CPU processes under `accelerate launch`: DistributedDataParallel, one launch for all cases."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import CASES

LAUNCH = [
    *(
        "--multi_gpu",
        "--num_processes",
        "2",
        "--num_machines",
        "1",
    ),  # --multi_gpu: "use torchrun", nothing more
    *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"),
]


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_losses_gradients_and_weights_are_bitwise_those_of_a_plain_run(
    tmp_path: Path, repository: Path
) -> None:
    result = tmp_path / "result.json"
    script = repository / "tests" / "integrations" / "two_process_run.py"
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
        "PYTHONPATH": str(repository),
    }
    command = [sys.executable, "-m", "accelerate.commands.launch", *LAUNCH, str(script), str(result)]
    run = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=380)
    assert run.returncode == 0, run.stderr[-4000:]
    for rank in (0, 1):
        found = json.loads(Path(f"{result}.{rank}").read_text())
        assert found.pop("worker log") == {"lines": 4}  # the last case, full recompute, on both ranks
        for way in ("whole", "regional"):
            checks = found.pop(f"compiled {way}")
            assert checks.pop("bytes") > 0, way
            assert [name for name, same in checks.items() if not same] == [], way
        assert len(found) == 3 * len(CASES)
        for name, checks in found.items():
            moved = checks.pop("bytes")
            assert (moved > 0) == ("recompute" not in name), name
            assert checks == {"losses": True, "grad_norms": True, "weights": True}, name
