"""The `tectonicfs` command."""
