"""Fixtures that tests of several areas use."""

from __future__ import annotations

from tests.postgres import postgres_server

__all__ = ["postgres_server"]
