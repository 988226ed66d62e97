"""Checkpoints: collective saves of nested state as directories of standard safetensors files."""
