"""The stock Trainer with the callback: same losses, right logs, nothing left behind."""

from __future__ import annotations

import logging
import pickle
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback

import hf_actswap
from hf_actswap import ActSwapCallback, ActSwapTrainer, MemoryPlan, PlanError
from hf_actswap.planner.oom_guard import DeviceMemoryError
from hf_actswap.report.run_files import read_run

from .conftest import CASE_1, CASE_2, CASE_3, CASE_4, CASES, Tokens, grad_norms, losses, tiny_llama

Make = Callable[..., Trainer]


def state_of(model: torch.nn.Module) -> dict[str, Any]:
    """Everything that a plan could leave on a model."""
    found: dict[str, Any] = {"use_cache": model.config.use_cache}
    for name, module in model.named_modules():
        found[name] = (
            type(module),
            sorted(vars(module)),
            len(module._forward_hooks),
            len(module._forward_pre_hooks),
            len(module._forward_hooks_always_called),
            len(module._forward_pre_hooks_with_kwargs),
        )
    return found


@pytest.mark.essential
@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"gradient_accumulation_steps": 2, "max_steps": 5}, marks=pytest.mark.slow),
        pytest.param({"bf16": True, "max_steps": 5}, marks=pytest.mark.slow),
        pytest.param({"eval_strategy": "steps", "eval_steps": 2, "max_steps": 5}, marks=pytest.mark.slow),
    ],
    ids=["plain", "accumulation", "bf16 autocast", "evaluation between"],
)
def test_losses_and_gradient_norms_are_bitwise_those_of_a_plain_run(
    make_trainer: Make, settings: dict[str, Any]
) -> None:
    plain = make_trainer(None, callback=False, **settings)
    plain.train()
    weights = {name: value.clone() for name, value in plain.model.state_dict().items()}
    for name, case in CASES.items():
        trainer = make_trainer(case, **settings)
        trainer.train()
        assert losses(trainer) == losses(plain), name
        assert grad_norms(trainer) == grad_norms(plain), name
        for key, value in trainer.model.state_dict().items():
            assert torch.equal(value, weights[key]), (name, key)


def test_statistics_reach_the_log_and_tensorboard(make_trainer: Make, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer = make_trainer(CASE_2, max_steps=4, report_to=["tensorboard"], logging_steps=2)
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    swapped = [entry["actswap_offloaded_gib"] for entry in entries]
    assert swapped[0] > 0
    assert len(set(swapped)) == 1
    assert swapped == [entry["actswap_prefetched_gib"] for entry in entries]
    (events,) = tmp_path.rglob("events.out.tfevents.*")
    tags = EventAccumulator(str(events.parent))
    tags.Reload()
    assert any("actswap_offloaded_gib" in tag for tag in tags.Tags()["scalars"])


DOCUMENTED = [
    (
        CASE_1,
        ["grep", "attention.flash_attention"],
        [f"-INFO - Set op_swap at layer {i}: attention.flash_attention, value=10" for i in range(4)],
    ),
    (
        CASE_2,
        ["grep", "Set layer swap at"],
        [f"-INFO - Set layer swap at layer {i} and value is: 20" for i in (0, 3)],
    ),
    (
        CASE_3,
        ["grep", "Set op_swap at layer"],
        [
            "-INFO - Set op_swap at layer 0: .attention, value=20",
            "-INFO - Set op_swap at layer 1: .attention, value=20, .feed_forward, value=15",
            "-INFO - Set op_swap at layer 2: .attention, value=20, .feed_forward, value=15",
            "-INFO - Set op_swap at layer 3: .attention, value=10",
        ],
    ),
    (
        CASE_4,
        ["grep", "Set op_swap at layer", "-C", "1"],
        [
            "-INFO - Set select recompute at layer 0: feed_forward",
            "-INFO - Set op_swap at layer 0: .attention, value=20",
            "-INFO - Set op_swap at layer 1: .attention, value=20, .feed_forward, value=15",
            "-INFO - Set op_swap at layer 2: .attention, value=20, .feed_forward, value=15",
            "-INFO - Set select recompute at layer 3: feed_forward",
            "-INFO - Set op_swap at layer 3: .attention, value=10",
        ],
    ),
]


@pytest.mark.parametrize(("case", "command", "expected"), DOCUMENTED, ids=["1", "2", "3", "4"])
def test_the_documents_grep_prints_exactly_their_lines(
    make_trainer: Make, tmp_path: Path, case: dict[str, Any], command: list[str], expected: list[str]
) -> None:
    make_trainer(case, max_steps=1).train()
    log = tmp_path / "out" / "worker_0.log"
    printed = subprocess.run([*command, str(log)], capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == expected


@pytest.mark.parametrize("log", ["summary", "full", "reference"])
def test_what_reaches_the_console_of_a_program_without_logging(
    make_trainer: Make,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    log: str,
) -> None:
    monkeypatch.setattr("logging.Logger.hasHandlers", lambda self: False)
    recompute = {"select_recompute": {"feed_forward": [0, 3], "input_layernorm.mul": True}}
    make_trainer({**CASE_4, "recompute_config": recompute, "log": log}, max_steps=2).train()
    shown = capsys.readouterr().err
    for line in (
        "INFO - Set op_swap at layer 3: .attention, value=10",
        "WARNING - input_layernorm.mul operator in all layers that is enabled swap do not work!",
    ):
        assert (line in shown) is (log == "reference")
        if log != "summary":
            assert f"-{line}" in (tmp_path / "out" / "worker_0.log").read_text()
    assert ("│ 1-2 " in shown) is (log != "summary")
    if log == "summary":
        lines = [line for line in shown.splitlines() if line.startswith(("INFO - ", "WARNING - "))]
        assert lines[:3] == [
            "INFO - Activation plan, 4 llama layers:",
            "INFO -   layers 0, 3: swap self_attn; recompute mlp, input_layernorm.mul",
            "INFO -   layers 1-2: swap self_attn, mlp; recompute input_layernorm.mul",
        ]
        *_, stays, moved, end = lines
        assert "stay on the device" in stays
        assert moved.startswith("INFO - A step moves 0.000")
        assert moved.endswith(" GiB again.")
        assert "without a plan (counted: what it swaps and recomputes)" in end
        assert len(lines) == 6
        assert list((tmp_path / "out").glob("*")) == []


def test_notes_take_two_lines_at_most(make_trainer: Make, caplog: pytest.LogCaptureFixture) -> None:
    foreign = {"monitor_config": {}, "runner_config": {}, "callbacks": []}
    for log, count in (("summary", 2), ("full", 3)):
        trainer = make_trainer({**CASE_4, **foreign, "log": log}, max_steps=1)
        caplog.clear()
        with caplog.at_level("INFO", logger="hf_actswap"):
            trainer.train()
        said = [record.getMessage() for record in caplog.records]
        first = next(at for at, line in enumerate(said) if "Activation plan" in line)
        assert first == count
        assert any("2 more note(s) on the configuration" in line for line in said) is (log == "summary")


def test_a_run_writes_where_it_was_asked_to(make_trainer: Make, tmp_path: Path) -> None:
    out = tmp_path / "out"
    found = []
    for log, trackers in (("summary", "none"), ("summary", ["tensorboard"]), ("full", "none")):
        trainer = make_trainer({**CASE_4, "log": log}, max_steps=2, report_to=trackers)
        trainer.train()
        found.append(sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.name in WRITTEN))
        (line,) = [entry for entry in trainer.state.log_history if entry.get("step") == 1]
        ours = {name for name in line if name.startswith("actswap_")}
        assert ours >= {"actswap_saved_gib", "actswap_stall_ms"}
        assert ("actswap_recomputes" in ours) is (log == "full")
    assert found == [
        [],
        ["runs/actswap/run.json"],
        ["actswap/run.json", "runs/actswap/run.json", "worker_0.log"],
    ]
    assert read_run(out).folder == out / "actswap"  # the later of the two


WRITTEN = ("run.json", "worker_0.log")


def test_a_run_always_ends_with_a_line(make_trainer: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="hf_actswap")
    for actswap, words in (
        ("auto", "ended in the planner's warm-up, before a plan was found"),
        (CASE_4, "counted: what it swaps and recomputes"),
    ):
        make_trainer(actswap, max_steps=1).train()
        assert words in caplog.records[-1].getMessage()


def trained_without_a_plan(make_trainer: Make) -> dict[str, Any]:
    """What the Trainer itself leaves on a model (it switches ``use_cache`` off)."""
    plain = make_trainer(None, callback=False, max_steps=1)
    plain.train()
    return state_of(plain.model)


def test_the_plan_is_removed_at_the_end(make_trainer: Make) -> None:
    trainer = make_trainer(CASE_4, max_steps=2)
    trainer.train()
    assert state_of(trainer.model) == trained_without_a_plan(make_trainer)


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_the_plan_is_removed_after_an_exception(make_trainer: Make, error: type[BaseException]) -> None:
    model = tiny_llama()
    before = trained_without_a_plan(make_trainer)
    trainer = make_trainer(CASE_4, model=model, data=Tokens(fail_at=11, error=error))
    with pytest.raises(error, match="data loader fails"):
        trainer.train()
    assert state_of(model) == before
    again = make_trainer(CASE_4, model=model, max_steps=2)
    again.train()
    assert state_of(model) == before


@pytest.mark.parametrize("where", ["forward", "backward", "optimizer"])
def test_running_out_of_memory_names_the_plan(make_trainer: Make, where: str) -> None:
    class Full(TrainerCallback):
        def on_step_begin(
            self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
        ) -> None:
            def full(*_: Any) -> None:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16.00 MiB.")

            if where == "optimizer":
                optimizer.optimizer.register_step_pre_hook(full)  # within Accelerate's
            elif where == "forward":
                model.model.norm.register_forward_hook(full)
            else:
                model.model.norm.register_full_backward_hook(full)

    trainer = make_trainer(CASE_2, max_steps=1)
    trainer.add_callback(Full())
    with pytest.raises(DeviceMemoryError, match=r"layers 0, 3: swap everything.*16\.00 MiB"):
        trainer.train()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_interrupt_inside_a_forward_leaves_nothing_behind(make_trainer: Make) -> None:
    class Interrupt(TrainerCallback):
        def on_step_begin(
            self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
        ) -> None:
            if state.global_step == 2:

                def stop(*_: Any) -> None:
                    raise KeyboardInterrupt

                model.model.layers[2].mlp.up_proj.register_forward_hook(stop)

    model = tiny_llama()
    trainer = make_trainer(CASE_4, model=model)
    trainer.add_callback(Interrupt())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert torch.overrides._get_current_function_mode_stack() == []
    model.model.layers[2].mlp.up_proj._forward_hooks.clear()
    plain, again = make_trainer(None, callback=False, max_steps=3), make_trainer(CASE_4, max_steps=3)
    plain.train()
    again.train()
    assert losses(again) == losses(plain)


@pytest.mark.parametrize(("given", "warns"), [(CASE_2, True), (CASE_4, False)], ids=["other", "same"])
def test_arguments_beside_a_callback_with_something_else_are_ignored_with_a_word(
    make_trainer: Make, caplog: pytest.LogCaptureFixture, given: dict[str, Any], warns: bool
) -> None:
    args = make_trainer(CASE_4).args
    caplog.clear()
    Trainer(tiny_llama(), args, train_dataset=Tokens(8), callbacks=[ActSwapCallback(given)])
    assert ("actswap of the training arguments is ignored" in caplog.text) is warns


def test_a_callback_added_later_works(make_trainer: Make) -> None:
    trainer = make_trainer(None, callback=False, max_steps=2)
    callback = ActSwapCallback(CASE_2)
    trainer.add_callback(callback)
    trainer.train()
    assert callback.applied is None
    plain = make_trainer(None, callback=False, max_steps=2)
    plain.train()
    assert losses(trainer) == losses(plain)


def test_the_lines_of_the_reference_are_there_for_who_asks_for_debug(
    make_trainer: Make, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("DEBUG", logger="hf_actswap"):
        make_trainer({**CASE_4, "log": "summary"}, max_steps=1).train()
    levels = {record.levelname for record in caplog.records if "Set op_swap" in record.getMessage()}
    assert levels == {"DEBUG"}


@pytest.mark.parametrize("trainer_class", [Trainer, ActSwapTrainer])
def test_any_trainer_acts_on_the_arguments_alone(make_trainer: Make, trainer_class: type[Trainer]) -> None:
    with_callback = make_trainer(CASE_4, max_steps=3)
    with_callback.train()
    args = pickle.loads(pickle.dumps(with_callback.args))
    args.report_to = "none"  # set later than at construction
    trainer = trainer_class(model=tiny_llama(), args=args, train_dataset=Tokens())
    trainer.train()
    for name in ("loss", "actswap_offloaded_gib", "actswap_recomputes"):
        found = [
            [entry[name] for entry in log if name in entry]
            for log in (trainer.state.log_history, with_callback.state.log_history)
        ]
        assert found[0] == found[1] != [], name
    assert losses(trainer)
    assert state_of(trainer.model) == trained_without_a_plan(make_trainer)


@pytest.mark.parametrize("later", [False, True], ids=["constructor", "add_callback"])
def test_a_callback_that_is_passed_acts_alone(make_trainer: Make, later: bool) -> None:
    """What it says counts, and not what the arguments say."""
    trainer = make_trainer(CASE_2, callback=False, max_steps=2)
    callback = ActSwapCallback({"recompute_config": {"recompute": True}})
    if later:
        trainer.add_callback(callback)
    else:
        trainer = Trainer(model=tiny_llama(), args=trainer.args, train_dataset=Tokens(), callbacks=[callback])
    seen: list[Any] = []

    class Look(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            found = trainer.callback_handler.callbacks
            (ours,) = [item for item in found if isinstance(item, ActSwapCallback)]
            seen.append(ours.applied)

    trainer.add_callback(Look())
    trainer.train()
    assert seen[0] is seen[1]
    fates = {row.fate for row in seen[0].plan.rows}
    assert "recompute" in fates
    assert "swap" not in fates


NOTHING = {
    "None": (None, "actswap=None"),
    "empty file": ("empty.yaml", "the configuration (empty.yaml) is empty"),
    "keeps everything": ({"swap_config": {"swap": True, "op_swap": []}}, "(mapping) keeps everything"),
}


def test_a_plan_that_keeps_everything_is_no_warning(
    make_trainer: Make, caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was found: the step fits as it is."""
    monkeypatch.chdir(tmp_path)
    Path("plan.json").write_text(MemoryPlan((), 4).to_json())
    with caplog.at_level(logging.INFO):
        make_trainer("plan.json", callback=False, max_steps=2).train()
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == []
    assert "Nothing is swapped or recomputed: the plan keeps everything" in caplog.text


@pytest.mark.parametrize(("actswap", "why"), NOTHING.values(), ids=NOTHING)
def test_one_warning_where_nothing_will_happen(
    make_trainer: Make,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    actswap: Any,
    why: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.yaml").write_text("# nothing\n")
    make_trainer(actswap, callback=False, max_steps=2).train()
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [line for line in warned if "Nothing is swapped or recomputed" in line] == warned
    assert len(warned) == 1
    assert why in warned[0]


@pytest.mark.parametrize("word", ["off", "none", False])
def test_a_word_for_off_is_no_plan_and_no_warning(
    make_trainer: Make, caplog: pytest.LogCaptureFixture, word: Any
) -> None:
    trainer = make_trainer(word, callback=False, max_steps=2)
    with caplog.at_level(logging.INFO):
        trainer.train()
    assert not any("actswap_saved_gib" in entry for entry in trainer.state.log_history)
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == []
    assert f"Nothing is swapped or recomputed: actswap={word!r}" in caplog.text


def test_a_plan_in_a_file_is_something_to_train_with(make_trainer: Make, tmp_path: Path) -> None:
    plan = hf_actswap.resolve_plan(hf_actswap.load_config(CASE_4), hf_actswap.model_structure(tiny_llama()))
    file = tmp_path / "plan.json"
    file.write_text(plan.to_json())
    by_plan, by_hand = make_trainer(str(file), callback=False, max_steps=3), make_trainer(CASE_4, max_steps=3)
    by_plan.train()
    by_hand.train()
    assert losses(by_plan) == losses(by_hand)
    for name in ("actswap_saved_gib",):
        assert by_plan.state.log_history[0][name] == by_hand.state.log_history[0][name] > 0


@pytest.mark.essential
def test_resume_from_checkpoint_continues_bitwise(make_trainer: Make, tmp_path: Path) -> None:
    saved = {"save_strategy": "steps", "save_steps": 4, "max_steps": 8}
    whole = make_trainer(CASE_4, **saved)
    whole.train()
    resumed = make_trainer(CASE_4, model=tiny_llama(seed=9), **saved)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-4"))
    assert losses(resumed) == losses(whole)


@pytest.mark.essential
def test_lora(make_trainer: Make) -> None:
    from peft import LoraConfig, get_peft_model

    def adapted() -> torch.nn.Module:
        lora = LoraConfig(
            r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=True
        )
        return get_peft_model(tiny_llama(), lora)

    plain = make_trainer(None, model=adapted(), callback=False, max_steps=4)
    plain.train()
    for name, case in CASES.items():
        trainer = make_trainer(case, model=adapted(), max_steps=4)
        trainer.train()
        assert losses(trainer) == losses(plain), name


def test_what_does_not_fit_stops_before_the_first_step(make_trainer: Make) -> None:
    actswap = {"swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 1, "layers": [4, 9]}]}}
    message = "swap_config.layer_swap[0].layers: expected layers from 0 to 3, found 4, 9."
    trainer = make_trainer(actswap)
    with pytest.raises(PlanError) as caught:
        trainer.train()
    assert message in str(caught.value)
    assert trainer.state.global_step == 0


def test_several_devices_in_one_process_are_rejected(make_trainer: Make) -> None:
    trainer = make_trainer(CASE_1)
    trainer.args._n_gpu = 2
    with pytest.raises(PlanError, match="accelerate launch"):
        trainer.callback_handler.on_train_begin(trainer.args, trainer.state, trainer.control)
    with pytest.raises(PlanError, match=r"nn\.DataParallel"):
        hf_actswap.apply(torch.nn.DataParallel(tiny_llama()), CASE_1)


def test_what_stays_on_the_device_against_the_plan_is_said_once(
    make_trainer: Make, caplog: pytest.LogCaptureFixture
) -> None:
    make_trainer({**CASE_2, "memory": {"min_tensor_mib": 0.004}}, max_steps=3).train()
    said = [record.getMessage() for record in caplog.records if "stay on the device" in record.getMessage()]
    assert len(said) == 1
    assert said[0].endswith(
        "GiB a step are swapped by the plan and stay on the device: smaller than min_tensor_mib."
    )
