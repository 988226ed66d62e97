"""Fairness on the event loop, counted in turns instead of seconds."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio


async def turns_of_others(work: Callable[[], Awaitable[object]]) -> int:
    """How often another task had its turn while `work` ran."""
    turns = 0

    async def watch() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        await work()
        nursery.cancel_scope.cancel()
    return turns
