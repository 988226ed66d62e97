"""Run ids: equal on all ranks of a start of a job, different for starts that are told apart."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tectonic_client.checkpoint.runid import check_run_id, default_run_id, launcher_run_id
from tectonic_client.errors import BadOption
from tectonic_client.limits import MAX_RUN_ID_BYTES

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "1", "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "RANK": "2",
}  # fmt: skip


def test_torchrun_on_one_node() -> None:
    """Restarts get ids of their own; so do jobs that torchrun all calls "none"."""
    assert launcher_run_id(TORCHRUN) == "torchelastic/none/node0/29500/1"
    assert launcher_run_id(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "2"}) != (
        launcher_run_id(TORCHRUN)
    )
    assert launcher_run_id(TORCHRUN | {"MASTER_PORT": "29501"}) != launcher_run_id(TORCHRUN)


def test_torchrun_on_several_nodes() -> None:
    """Agents that count their restarts differently still are one job."""
    nodes = [
        TORCHRUN | {"WORLD_SIZE": "8", "TORCHELASTIC_RESTART_COUNT": count} for count in ("0", "1")
    ]
    assert launcher_run_id(nodes[0]) == launcher_run_id(nodes[1])


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"PMIX_NAMESPACE": "prterun-1@1", "SLURM_JOB_ID": "7"}, "pmix/prterun-1@1/"),
        ({"OMPI_MCA_ess_base_jobid": "42", "SLURM_JOB_ID": "7"}, "ompi/42/"),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}, "slurm/7/0/"),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_RESTART_COUNT": "2"}, "slurm/7/0/2"),
        ({"SLURM_JOB_ID": "7", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "slurm/7//"),
        ({"PMI_JOBID": "5.0"}, "pmi/5.0"),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "1"}, "master/a/1"),
        ({"RANK": "3", "PMIX_NAMESPACE": ""}, None),
    ],
)
def test_other_launchers(environ: dict[str, str], expected: str | None) -> None:
    """The most specific launcher counts, with its job, step and restart."""
    assert launcher_run_id(environ) == expected


def test_long_ids_are_shortened() -> None:
    """Whatever a launcher says, the id fits in a key, and different ones stay different."""
    ids = {launcher_run_id({"PMIX_NAMESPACE": "x" * 500 + tail}) for tail in ("a", "b")}
    assert len(ids) == 2
    for run_id in ids:
        assert run_id is not None
        check_run_id(run_id)


def test_children_of_one_parent_share_an_id() -> None:
    """Without a launcher, processes started by one process agree, and their parent differs."""
    program = "from tectonic_client.checkpoint.runid import default_run_id as d; print(d(), end='')"
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TORCHELASTIC", "PMI", "OMPI", "SLURM", "MASTER"))
    }
    said = {
        subprocess.run(
            [sys.executable, "-c", program], env=environ, capture_output=True, text=True,
            check=True, timeout=60,
        ).stdout
        for _ in range(2)
    }  # fmt: skip
    (run_id,) = said
    assert run_id.startswith("parent/")
    assert run_id.split("/")[-2] == str(os.getpid())
    assert default_run_id() != run_id


@pytest.mark.parametrize("run_id", ["", "x" * (MAX_RUN_ID_BYTES + 1), "ü" * 101, "\ud800"])
def test_impossible_run_ids(run_id: str) -> None:
    """An id that cannot be kept in a key is refused."""
    with pytest.raises(BadOption, match="run_id"):
        check_run_id(run_id)
    check_run_id("gpt/3 ü")
