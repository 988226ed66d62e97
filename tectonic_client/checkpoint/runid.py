"""Which job, and which start of it, a rank belongs to, where the caller does not say.

A run id must be the same on all ranks of a job, and should differ between two starts of it (see
`attempts` for what happens where it does not). What launchers offer:

* torchrun: TORCHELASTIC_RUN_ID ("none" unless --rdzv-id is given) and the rendezvous address, equal
  on all ranks. TORCHELASTIC_RESTART_COUNT is what one node's agent counts: nodes that joined or
  restarted at different times disagree on it, so it is used only where one agent has all ranks.
* PMIx (Open MPI, Slurm's pmix plugin): PMIX_NAMESPACE names the launch. Open MPI comes before
  Slurm: inside an allocation not all of mpirun's processes see the same Slurm step.
* Slurm: job, step (one srun each) and restart count.
* MASTER_ADDR and MASTER_PORT, set by hand for torch.distributed.
* Nothing: processes started by one parent on one host are one job.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from hashlib import blake2b

from tectonic_client.errors import BadOption
from tectonic_client.limits import MAX_RUN_ID_BYTES
from tectonic_client.metadata.sessions import process_started_ticks, this_host


def launcher_run_id(environ: Mapping[str, str]) -> str | None:
    """The launcher's name for this start of the job; None without one. Pure."""
    if environ.get("TORCHELASTIC_RUN_ID"):
        one_agent = environ.get("LOCAL_WORLD_SIZE") == environ.get("WORLD_SIZE")
        restarts = ("TORCHELASTIC_RESTART_COUNT",) if one_agent else ()
        names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", *restarts)
        return _joined("torchelastic", environ, names)
    for kind, names in (
        ("pmix", ("PMIX_NAMESPACE", "SLURM_RESTART_COUNT")),
        ("ompi", ("OMPI_MCA_ess_base_jobid", "SLURM_RESTART_COUNT")),
        ("slurm", ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")),
        ("pmi", ("PMI_JOBID",)),
        ("master", ("MASTER_ADDR", "MASTER_PORT")),
    ):
        if environ.get(names[0]):
            return _joined(kind, environ, names)
    return None


def _joined(kind: str, environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    run_id = "/".join((kind, *(environ.get(name, "") for name in names)))
    if len(run_id.encode("utf-8", "surrogateescape")) <= MAX_RUN_ID_BYTES:
        return run_id
    digest = blake2b(run_id.encode("utf-8", "surrogateescape"), digest_size=16)
    return f"{kind}/{digest.hexdigest()}"


def default_run_id() -> str:
    """The launcher's run id, else one that all children of this process's parent share."""
    named = launcher_run_id(os.environ)
    if named is not None:
        return named
    parent = os.getppid()
    return f"parent/{this_host().identity}/{parent}/{process_started_ticks(parent) or 0}"


def check_run_id(run_id: str) -> None:
    """Raise BadOption for what cannot be a run id: it is kept as UTF-8 in a key."""
    try:
        length = len(run_id.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise BadOption(f"run_id {run_id!r} is not valid Unicode") from error
    if not 1 <= length <= MAX_RUN_ID_BYTES:
        raise BadOption(f"run_id has {length} bytes, 1 to {MAX_RUN_ID_BYTES} are allowed")
