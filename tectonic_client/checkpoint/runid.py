"""Which job a rank belongs to, where the caller does not say."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from tectonic_client.metadata.sessions import process_started_ticks, this_host

_LAUNCHERS: Final = (
    # (variable that names the job, variable that counts its restarts)
    ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"),
    ("OMPI_MCA_ess_base_jobid", None),
    ("PMI_JOBID", None),
)


def launcher_run_id(environ: Mapping[str, str]) -> str | None:
    """The launcher's name for this start of the job; None without one. Pure.

    torchrun without --rdzv-id names every job "none": its rendezvous address is added.
    """
    for variable, restarts in _LAUNCHERS:
        job = environ.get(variable)
        if job:
            address = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
            place = ":".join(address) if job == "none" else ""
            count = environ.get(restarts, "0") if restarts else "0"
            return f"{variable.split('_')[0].lower()}/{job}{place}/{count}"
    return None


def default_run_id() -> str:
    """The launcher's run id, else one that all children of this process's parent share."""
    named = launcher_run_id(os.environ)
    if named is not None:
        return named
    parent = os.getppid()
    return f"parent/{this_host().identity}/{parent}/{process_started_ticks(parent) or 0}"
