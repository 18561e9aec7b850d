"""The curves benchmark trains what it says, with the same batches however many processes there are."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.parallel_curves import (
    GLOBAL_BATCH,
    LAYOUTS,
    Curve,
    Layout,
    arguments_of,
    compare,
    launcher_of,
    run,
    table,
)
from benchmarks.pictures import draw_curves

REPOSITORY = Path(__file__).resolve().parents[2]
TEXT = REPOSITORY.parent / "shared" / "wikitext-2" / "valid.txt"
TINY = {
    "vocab_size": "300",
    "num_layers": "4",
    "hidden_size": "32",
    "block_size": "32",
    "num_heads": "4",
    "learning_rate": "0.02",
    "warmup_steps": "0",
}
STEPS, LIMIT_S = 5, 120
RELATIVE_TOLERANCE = 1e-5


def curve(name: str, losses: list[float]) -> Curve:
    return Curve(name, 1, [], loss=losses, grad_norm=[2 * loss for loss in losses])


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_what_the_recipe_is_told(layout: Layout) -> None:
    told = arguments_of(layout, STEPS, TINY)
    values = dict(zip(told[::2], told[1::2], strict=True))
    batch = int(values["--per_device_train_batch_size"])
    assert batch * layout.data_parallel_size == GLOBAL_BATCH
    assert values.get("--actswap") == ("none" if layout.tensor_parallel_size == 1 else None)
    assert ("--multi_gpu" in launcher_of(layout)) is (layout.processes > 1)


def test_how_far_apart() -> None:
    first, other = curve("one", [4.0, 2.0]), curve("two", [4.0, 1.5])
    compare(first, other)
    assert other.largest_loss_difference == 0.5
    assert other.mean_loss_difference == other.largest_relative_loss_difference == 0.25
    assert other.largest_relative_grad_norm_difference == 0.25
    assert "two" in table([first, other])
    with pytest.raises(ValueError, match="zip"):
        compare(first, curve("shorter", [4.0]))


def test_picture(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "curves.png"
    draw_curves([{"name": "one", "loss": [2.0, 1.0]}, {"name": "two", "loss": [2.0, 1.1]}], path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.dist
def test_same_curve() -> None:
    if not TEXT.is_file():
        pytest.skip(f"no text beside the repository: {TEXT.parent.name}")
    curves = run(TEXT, STEPS, TINY, LAYOUTS[:3], LIMIT_S)
    assert [len(found.loss) for found in curves] == [STEPS] * 3
    assert curves[0].loss[-1] < curves[0].loss[0]
    for found in curves[1:]:
        assert found.largest_relative_loss_difference < RELATIVE_TOLERANCE
        assert found.largest_relative_grad_norm_difference < 1e-3
