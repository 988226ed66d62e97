"""Checkpoints: collective saves of nested state as directories of standard safetensors files."""

from tectonic_client.checkpoint.directory import VerifyReport
from tectonic_client.checkpoint.loading import LoadReport
from tectonic_client.checkpoint.manager import CheckpointManager
from tectonic_client.checkpoint.saving import SaveReport

__all__ = ["CheckpointManager", "LoadReport", "SaveReport", "VerifyReport"]
