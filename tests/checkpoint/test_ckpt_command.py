"""`tectonicfs ckpt`: what it prints, its exit codes, and one line for whatever is wrong."""

from __future__ import annotations

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import trio

from tectonic_client.checkpoint import CheckpointManager
from tectonic_client.checkpoint.directory import CheckpointDirectory
from tectonic_client.cli.main import main
from tectonic_client.volume import open_volume
from tests.checkpoint.damage import chunks_of
from tests.checkpoint.rankprocesses import state_of
from tests.checkpoint.threadranks import DIRECTORY, save_together, thread_ranks
from tests.leaks import assert_no_leaks, clean


class Said(NamedTuple):
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def error(self) -> str:
        """Its one line on stderr, after failing."""
        assert self.code == 1, self
        assert self.err.startswith("tectonicfs: "), self
        assert self.err.count("\n") == 1, self
        return self.err


def ckpt(*arguments: object, answer: str = "") -> Said:
    """Run `tectonicfs ckpt`, as the console script does, its output a pipe."""
    out, err = io.StringIO(), io.StringIO()
    with (
        redirect_stdout(out),
        redirect_stderr(err),
        mock.patch.object(sys, "argv", ["tectonicfs", "ckpt", *map(str, arguments)]),
        mock.patch.object(sys, "stdin", io.StringIO(answer)),
    ):
        code = _exit_code()
    return Said(code, out.getvalue(), err.getvalue())


def _exit_code() -> int:
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.fixture
def saved(url: str) -> str:
    """Steps 3 and 12 by two ranks."""
    with thread_ranks(url, 2, "job-7") as ranks:
        for step in (3, 12):
            save_together(ranks, step, [state_of(rank, step) for rank in range(2)], timeout=30)
    return url


def part(step: int, rank: int) -> str:
    return f"{DIRECTORY}/step-{step:010}/rank-{rank:05}-of-00002.safetensors"


def index(step: int) -> str:
    return f"{DIRECTORY}/step-{step:010}/index.json"


def test_what_was_saved_is_listed_and_shown(saved: str) -> None:
    """ls and show tell of steps, ranks and sizes; --json holds the same."""
    said = ckpt("ls", saved, DIRECTORY)
    assert said.code == 0
    rows = [line.split() for line in said.out.splitlines()]
    assert [row[:2] for row in rows[1:]] == [["3", "2"], ["12", "2"]]
    assert all(row[-1] == "job-7" for row in rows[1:])
    listed = ckpt("ls", saved, DIRECTORY, "--json").json
    assert [step["step"] for step in listed["steps"]] == [3, 12]
    newest = ckpt("show", saved, DIRECTORY, "--json").json
    assert newest["step"] == 12
    older = ckpt("show", saved, DIRECTORY, "--step", 3, "--json").json
    assert older["bytes"] == listed["steps"][0]["bytes"] == sum(r["bytes"] for r in older["ranks"])
    assert [rank["file"] for rank in older["ranks"]] == [Path(part(3, r)).name for r in range(2)]
    said = ckpt("show", saved, DIRECTORY, "--step", 3)
    assert said.out.count("slowest") == 1
    for rank in range(2):
        assert Path(part(3, rank)).name in said.out


def test_names_are_printed_as_they_are(url: str) -> None:
    """What rich would read as markup or emoji stays, and a pipe gets it whole."""
    run_id = "job[/b]:bug:[red]" + "x" * 150
    step = 10**18 - 1
    with CheckpointManager(url, DIRECTORY, run_id=run_id) as manager:
        manager.save(step, {"a": 1}, metadata={"note[/]": "[bold]:smile:"})
    said = ckpt("ls", url, DIRECTORY)
    assert said.code == 0, said
    assert said.out.splitlines()[1].split()[0] == str(step)
    assert run_id in said.out
    said = ckpt("show", url, DIRECTORY)
    assert said.code == 0, said
    assert run_id in said.out
    assert "note[/]: [bold]:smile:" in said.out


def test_verify_finds_all_damage(saved: str) -> None:
    """Exit code 1 with tensor, file, block and store of each bad chunk, else 0."""
    said = ckpt("verify", saved, DIRECTORY)
    assert said.code == 0
    assert [line.split(",")[:2] for line in said.out.splitlines()] == [
        ["step 3: ok", " 2 files"], ["step 12: ok", " 2 files"],
    ]  # fmt: skip
    bad = [chunks_of(saved, part(3, 0))[-2], chunks_of(saved, part(3, 1))[1]]
    bad[0].damage("flip")
    bad[1].damage("remove")
    said = ckpt("verify", saved, DIRECTORY)
    assert said.code == 1
    first, *problems, last = said.out.splitlines()
    assert first.startswith("step 3: DAMAGED")
    assert last.startswith("step 12: ok")
    assert len(problems) == 2
    for rank, (chunk, problem) in enumerate(zip(bad, problems, strict=True)):
        for word in ("tensor ", part(3, rank), *chunk.words):
            assert word in problem
    assert ckpt("verify", saved, DIRECTORY, "--step", 12).code == 0
    said = ckpt("verify", saved, DIRECTORY, "--json")
    assert said.code == 1
    assert [(step["step"], step["ok"]) for step in said.json["steps"]] == [(3, False), (12, True)]
    assert [f"  {problem}" for problem in said.json["steps"][0]["problems"]] == problems


def test_a_step_with_a_damaged_index_hides_no_other(saved: str) -> None:
    """ls lists what it can read, says what it cannot, and fails."""
    chunks_of(saved, index(3))[0].damage("flip")
    said = ckpt("ls", saved, DIRECTORY)
    assert index(3) in said.error
    assert [line.split()[0] for line in said.out.splitlines()[1:]] == ["3", "12"]
    assert "DAMAGED" in said.out
    said = ckpt("ls", saved, DIRECTORY, "--json")
    assert said.code == 1
    damaged, whole = said.json["steps"]
    assert index(3) in damaged["problem"]
    assert whole["step"] == 12
    assert index(3) in ckpt("show", saved, DIRECTORY, "--step", 3).error
    said = ckpt("verify", saved, DIRECTORY)
    assert said.code == 1
    assert index(3) in said.out
    assert "step 12: ok" in said.out


def _chunks_left(url: str) -> int:
    async def look() -> int:
        async with open_volume(url) as volume:
            await clean(volume)
            await assert_no_leaks(volume)
            found = 0
            for store_id in volume.stores.ids():
                chunks = await volume.stores.run(store_id, lambda store: list(store.list(0, 2**63)))
                found += len(chunks)
            return found

    return trio.run(look)


def test_removed_steps_and_their_bytes_are_gone(saved: str) -> None:
    """rm asks first; a step named twice is removed once."""
    before = _chunks_left(saved)
    said = ckpt("rm", saved, DIRECTORY, 3, answer="n\n")
    assert said.code == 130
    assert "Traceback" not in said.err
    assert ckpt("rm", saved, DIRECTORY, 3, answer="y\n").code == 0
    assert [s["step"] for s in ckpt("ls", saved, DIRECTORY, "--json").json["steps"]] == [12]
    assert _chunks_left(saved) == before / 2
    said = ckpt("rm", "--yes", saved, DIRECTORY, 12, 12, "--json")
    assert said.json == {"directory": DIRECTORY, "removed": [12]}
    assert ckpt("ls", saved, DIRECTORY, "--json").json["steps"] == []
    assert _chunks_left(saved) == 0
    assert ckpt("verify", saved, DIRECTORY).out == f"no committed step in {DIRECTORY}\n"


def test_without_an_answer_nothing_is_removed(saved: str) -> None:
    """rm whose question nobody can answer says how to do without; one of a step that is not there
    does not ask."""
    said = ckpt("rm", saved, DIRECTORY, 3)
    assert said.code == 1
    assert said.err.endswith("tectonicfs: nobody answered: --yes removes without asking\n")
    assert "no committed step 5" in ckpt("rm", saved, DIRECTORY, 3, 5, answer="y\n").error
    assert [s["step"] for s in ckpt("ls", saved, DIRECTORY, "--json").json["steps"]] == [3, 12]


def test_nothing_is_removed_unless_all_exists(saved: str) -> None:
    """rm of one step that is there and one that is not removes neither."""
    assert "no committed step 5" in ckpt("rm", "--yes", saved, DIRECTORY, 3, 5).error
    assert [s["step"] for s in ckpt("ls", saved, DIRECTORY, "--json").json["steps"]] == [3, 12]


@pytest.mark.parametrize(
    "command", [("ls",), ("show",), ("verify",), ("rm", "--yes", "3")], ids=lambda c: c[0]
)
@pytest.mark.parametrize(
    ("directory", "complaint"),
    [
        ("/typo", "no directory /typo in the volume; a path begins at the volume's root"),
        ("", "'' is not an absolute path in the volume"),
        ("runs/test", "'runs/test' is not an absolute path in the volume"),
        (index(3), f"{index(3)} is not a directory"),
        (f"{index(3)}/x", f"{index(3)}/x is not a directory"),
    ],
)
def test_a_bad_directory_is_one_line(
    saved: str, command: tuple[str, ...], directory: str, complaint: str
) -> None:
    """A mistyped directory is an error of every command, never an empty success."""
    name, *options = command
    assert complaint in ckpt(name, saved, directory, *options[::-1]).error


@pytest.mark.parametrize(
    "command", [("show", "--step"), ("verify", "--step"), ("rm", "--yes")], ids=lambda c: c[0]
)
@pytest.mark.parametrize("step", [4, 10**30])
def test_a_step_that_is_not_there_is_one_line(
    saved: str, command: tuple[str, ...], step: int
) -> None:
    """The line says which steps there are."""
    name, option = command
    said = ckpt(name, saved, DIRECTORY, option, step)
    assert f"no committed step {step} in {DIRECTORY}; there are 3, 12" in said.error


@pytest.mark.parametrize("command", [("ls",), ("show",), ("verify",), ("rm", "--yes", "3")])
def test_a_bad_volume_is_one_line(command: tuple[str, ...], tmp_path: Path) -> None:
    """No volume, no directory for one, a file of something else, a URL of nothing we know."""
    name, *options = command
    text = tmp_path / "notes.txt"
    text.write_text("not a database")
    for meta in (tmp_path / "nothing.db", tmp_path / "no" / "dir.db", text, "gopher://volume", ""):
        assert ckpt(name, meta, "/runs", *options[::-1]).error
    assert sorted(tmp_path.iterdir()) == [text]


def test_wrong_usage_is_told_apart(saved: str) -> None:
    """Exit code 2 for what cannot be a command line."""
    for arguments in (("ls", saved), ("show", saved, "/r", "--step", "x"), ("rm", saved, "/r")):
        assert ckpt(*arguments).code == 2


def test_a_step_that_disappears_is_left_out(saved: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody prunes while ls and verify go through the steps."""
    with CheckpointManager(saved, DIRECTORY, run_id="pruning") as manager:
        list_steps = CheckpointDirectory.steps
        at = {"pruned": False}

        async def prune_then(self: CheckpointDirectory) -> list[int]:
            steps = await list_steps(self)
            if not at["pruned"]:
                at["pruned"] = True
                await trio.to_thread.run_sync(manager.delete, steps[0])
            return steps

        monkeypatch.setattr(CheckpointDirectory, "steps", prune_then)
        manager.save(20, {"a": np.arange(3)})
        at["pruned"] = False
        said = ckpt("ls", saved, DIRECTORY, "--json")
        assert said.code == 0, said
        left = [step["step"] for step in said.json["steps"]]
        at["pruned"] = False
        said = ckpt("verify", saved, DIRECTORY, "--json")
        assert said.code == 0, said
        assert [step["step"] for step in said.json["steps"]] == left[1:]
