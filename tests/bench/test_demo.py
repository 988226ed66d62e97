"""The demo: a small one in all its parts, its end by a signal, and what it would find wrong."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from bench.demo import __main__ as demo
from bench.demo import place
from bench.demo.findings import resumed_steps, throughput_rows, wrong_losses
from bench.demo.job import Job
from bench.demo.moment import Moment, choose_moment, describe
from bench.demo.rank import Task, differences, same_bits, tensors_of
from bench.demo.record import Event, Record, Transfer, throughput, unequal_steps
from bench.demo.runs import MIN_STEPS, Runs, Stage, saved_steps
from bench.demo.screen import Screen
from bench.demo.train import Settings, choose_owners, create_optimizer_state
from bench.errors import BenchError, RankFailed
from tectonic_client.errors import MountError

TIMEOUT_S = 110.0

SMALL = ("--steps", str(MIN_STEPS), "--width", "64", "--layers", "1", "--ranks", "2")


def start_demo(directory: Path, *arguments: str) -> subprocess.Popen[str]:
    """`python -m bench.demo`, as `./run demo` starts it."""
    return subprocess.Popen(
        [sys.executable, "-m", "bench.demo", "--dir", str(directory), *SMALL, *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


# --- whole demos ------------------------------------------------------------------------------


@pytest.mark.fuse
def test_a_killed_run_resumes_exactly(disk_path: Path, tmp_path: Path) -> None:
    """Losses after kill -9 equal the uninterrupted run's; the mount shows the same tensors."""
    result_file = tmp_path / "result.json"
    parent = disk_path / "parent"
    parent.mkdir()
    with start_demo(parent, "--json", str(result_file)) as process:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, output
    assert re.search(r"all \d+ losses after resuming equal .*, bit for bit", output), output
    assert re.search(r"\d+ tensors of step \d+, loaded with safetensors, equal", output), output
    assert re.search(r"the files of step \d+ equal the uninterrupted run's", output), output
    result = json.loads(result_file.read_text())
    assert result["bench"] == "demo"
    assert all(bar["ok"] and bar["value"] >= 1 for bar in result["bars"])
    assert {(row["case"], row["metric"]) for row in result["rows"]} >= {
        ("raw device", "save"), ("raw device", "load"),
    }  # fmt: skip
    assert list(parent.iterdir()) == []


@pytest.mark.fuse
def test_an_interrupted_demo_leaves_nothing(disk_path: Path) -> None:
    """Ctrl-C while ranks train ends them, unmounts, and removes the directory."""
    with start_demo(disk_path) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "loss" in line:
                process.send_signal(signal.SIGINT)
                break
        output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 128 + signal.SIGINT, output
    assert "interrupted" in output
    assert list(disk_path.iterdir()) == []


def test_a_machine_without_fuse_shows_the_rest(
    disk_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where nothing can be mounted, one line says so, and the run is still killed and resumed."""

    def refuse(directory: str, options: object) -> str:
        raise MountError("there is no /dev/fuse: load the module")

    monkeypatch.setattr(place, "check", refuse)
    options = demo.Options(steps=MIN_STEPS, ranks=1, seed=1, width=64, layers=1)
    result, problems = demo.Demo(options, Screen()).run(disk_path)
    output = capsys.readouterr().out
    assert problems == []
    assert result.ok
    assert result.config["mounted"] is False
    assert output.count("goes on without a mount: there is no /dev/fuse") == 1
    assert "bit for bit" in output


def test_a_rank_that_fails_is_named(tmp_path: Path) -> None:
    """A rank that ends with an error ends the job; the error names the rank and its reason."""
    settings = Settings(str(tmp_path / "none.db"), "/runs/x", 1, 1, 64, 1, seed=0)
    with Job(Task(settings), 1, tmp_path) as job, pytest.raises(RankFailed) as caught:
        list(job.events())
    assert "rank 0 ended with status 1" in str(caught.value)
    assert "VolumeNotFound" in str(caught.value)


# --- what would be found wrong ----------------------------------------------------------------


def runs_of(
    reference: dict[int, float], killed: dict[int, float], resumed: dict[int, float]
) -> Runs:
    """Runs with these losses that were resumed at step 1, and a second for each transfer."""

    def record(losses: dict[int, float]) -> Record:
        made = Record(1, losses=losses)
        for kind in ("training save", "save", "load", "raw write", "raw read"):
            made.transfers[kind] = [{0: Transfer(10**9, 1.0)}]
        return made

    last = record(resumed)
    last.resumed_at = 1
    return Runs(record(reference), record(killed), last, "all ranks saving step 2", (1,))


GOOD = runs_of({1: 3.0, 2: 2.0, 3: 1.0}, {1: 3.0, 2: 2.0}, {2: 2.0, 3: 1.0})


def test_equal_losses_are_no_problem() -> None:
    """A resumed run whose losses are the uninterrupted one's passes."""
    assert list(wrong_losses(GOOD)) == []
    assert resumed_steps(GOOD) == (2, 2)


@pytest.mark.parametrize(
    ("killed", "resumed", "expected"),
    [
        ({1: 3.0}, {2: 2.0000002384185791, 3: 1.0}, "step 2 has 2.0 in the uninterrupted run"),
        ({1: 3.0}, {2: 2.0}, "None in the resumed one"),
        ({1: 3.5}, {2: 2.0, 3: 1.0}, "3.5 in the killed one"),
    ],
)
def test_losses_that_differ_are_a_problem(
    killed: dict[int, float], resumed: dict[int, float], expected: str
) -> None:
    """A loss that differs in its last bit, or is missing, is reported with its step."""
    [line] = wrong_losses(runs_of({1: 3.0, 2: 2.0, 3: 1.0}, killed, resumed))
    assert line.startswith("LOSSES DIFFER")
    assert expected in line


def test_resuming_from_another_step_is_a_problem() -> None:
    """Having started from anything but the newest committed step is reported."""
    wrong = replace(GOOD, committed=(1, 2))
    assert any("resumed from step 1, not from 2" in line for line in wrong_losses(wrong))


def test_losses_that_differ_make_the_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command fails, with a line that says what differs, and still cleans up."""
    wrong = runs_of({1: 3.0, 2: 2.0}, {1: 3.0}, {2: 2.5})

    def run_all(stage: Stage, mount: Path | None) -> Runs:
        return wrong

    monkeypatch.setattr(demo, "_exit_on_signals", lambda: None)
    monkeypatch.setattr(place, "why_no_mount", lambda directory: "not here")
    monkeypatch.setattr(Stage, "run_all", run_all)
    result = CliRunner().invoke(demo.main, ["--dir", str(tmp_path)])
    assert result.exit_code == 1
    assert "LOSSES DIFFER: step 2" in result.output
    assert "exactly as if nothing had happened" not in result.output
    assert list(tmp_path.iterdir()) == []


def test_a_command_that_fails_is_one_line(tmp_path: Path) -> None:
    """An error of the tectonicfs command arrives with its reason."""
    with pytest.raises(BenchError, match=r"tectonicfs ckpt: tectonicfs: .*none\.db"):
        place.tectonicfs(Screen(), "ckpt", "ls", tmp_path / "none.db", "/runs/x")


def test_any_bit_of_a_tensor_counts() -> None:
    """Zeros of either sign, other dtypes and shapes, and missing tensors are differences."""
    zero, negative = torch.zeros(2), -torch.zeros(2)
    assert same_bits(zero, zero.clone())
    assert not same_bits(zero, negative)
    assert not same_bits(zero, zero.double())
    assert not same_bits(zero, zero.reshape(1, 2))
    assert same_bits(torch.tensor(1.0), torch.tensor(1.0))
    assert differences({"a": zero, "b": zero}, {"b": negative, "c": zero}) == ["a", "b", "c"]


def test_tensors_have_the_names_of_a_checkpoint() -> None:
    """Names are the path in the state with dots, as the files have them."""
    state = {"model": {"w": torch.zeros(1)}, "list": [1, torch.ones(2)], "step": 3}
    assert [name for name, _ in tensors_of(state)] == ["model.w", "list.1"]


# --- the parts of it --------------------------------------------------------------------------


@given(st.integers(), st.integers(MIN_STEPS, 40))
def test_the_kill_is_between_the_first_and_the_last_save(seed: int, steps: int) -> None:
    """There is a step to resume from, and steps are left to compare."""
    saves = saved_steps(steps)
    moment = choose_moment(random.Random(seed), saves)
    assert saves[0] < moment.step < saves[-1] == steps
    assert moment.event == "step" or moment.step in saves
    delay_s = moment.delay_s(save_seconds=0.1, step_seconds=2.0)
    assert 0 <= delay_s <= (0.1 if moment.event == "saving" else 2.0)


def test_a_moment_is_begun_by_its_event_only() -> None:
    """The delay counts from the event of the moment's own step."""
    moment = Moment("saving", 6, 0.5)
    assert moment.is_begun_by(Event(2, "saving", {"step": 6}, 0.0))
    assert not moment.is_begun_by(Event(2, "saving", {"step": 3}, 0.0))
    assert not moment.is_begun_by(Event(2, "step", {"step": 6}, 0.0))


def test_what_ranks_do_is_told_together() -> None:
    """Ranks that do the same are named together."""
    assert describe({1: "saving step 6", 0: "saving step 6"}) == "all ranks saving step 6"
    doing = {0: "saving step 6", 1: "training step 7", 2: "saving step 6"}
    assert describe(doing) == "ranks 0, 2 saving step 6; rank 1 training step 7"


def test_throughput_is_that_of_the_slowest_rank() -> None:
    """All bytes count, over the longest time; transfers that not all ranks ended do not count."""
    assert throughput([Transfer(100, 1.0), Transfer(300, 2.0)]) == 200.0
    record = Record(2)
    for rank, seconds in ((0, 1.0), (0, 9.0), (1, 2.0)):
        record.add(Event(rank, "saved", {"step": 3, "bytes": 100, "seconds": seconds}, 0.0))
    assert record.throughputs("training save") == (100.0,)
    rows = throughput_rows(GOOD)
    assert {row.metric: row.vs for row in rows if row.case == "checkpoint API, repeated"} == {
        "save": {"raw device": 1.0}, "load": {"raw device": 1.0},
    }  # fmt: skip


def test_not_a_number_is_never_equal() -> None:
    """A loss that is not a number does not pass for the same one."""
    assert unequal_steps({1: float("nan"), 2: 1.0}, {1: float("nan"), 2: 1.0}) == [1]


@given(st.dictionaries(st.text(max_size=3), st.integers(1, 1000), max_size=30), st.integers(1, 8))
def test_parameters_are_shared_out_evenly(sizes: dict[str, int], world_size: int) -> None:
    """Each parameter has one owner, and no rank owns more than the largest one above another."""
    owners = choose_owners(sizes, world_size)
    assert owners.keys() == sizes.keys()
    loads = [0] * world_size
    for name, owner in owners.items():
        loads[owner] += sizes[name]
    assert max(loads) - min(loads) <= max(sizes.values(), default=0)


def test_creating_the_optimizers_state_changes_nothing_else() -> None:
    """Parameters, gradients and learning rates are as before; the tensors to load into exist."""
    parameter = torch.nn.Parameter(torch.randn(3))
    before = parameter.detach().clone()
    optimizer = torch.optim.AdamW([parameter], lr=0.5)
    create_optimizer_state(optimizer)
    assert torch.equal(parameter, before)
    assert parameter.grad is None
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert set(optimizer.state_dict()["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}


def test_a_task_survives_the_command_line() -> None:
    """A rank's process gets the task that was meant."""
    settings = Settings("a.db", "/runs/x", 9, 3, 64, 1, seed=7, rendezvous="file:///x")
    task = Task(settings, scratch="/s", step_directory="/m")
    assert Task.from_json(task.to_json()) == task
