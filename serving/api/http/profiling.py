"""`/start_profile` and `/stop_profile`: what the device and the host do, for XProf. Operators only."""

from __future__ import annotations

import asyncio
import logging

import jax
from fastapi import APIRouter, Depends

from serving.api.http.errors import ApiError
from serving.api.http.keys import admin_only

log = logging.getLogger(__name__)


class Profiler:
    """At most one profile of this process at a time, and none for longer than `seconds`: it is held in memory until it
    is written.

    Args:
        directory: where profiles are written; None refuses them.
        seconds: after which a profile ends by itself.
    """

    def __init__(self, directory: str | None, seconds: float) -> None:
        self._directory, self._seconds = directory, seconds
        self._lock = asyncio.Lock()
        self._end: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Begins a profile. Returns its folder.

        Raises:
            ApiError: there is no folder for it, or a profile runs.
        """
        if self._directory is None:
            raise ApiError(400, "no folder for profiles: start the server with --profile-dir", code="no_profile_dir")
        async with self._lock:
            if self._end is not None:
                raise ApiError(409, "a profile is running: end it by /stop_profile", code="profile_running")
            await asyncio.to_thread(jax.profiler.start_trace, self._directory)
            self._end = asyncio.create_task(self._end_later())
        return self._directory

    async def stop(self) -> str:
        """Ends the profile and writes it. Returns its folder.

        Raises:
            ApiError: none runs.
        """
        async with self._lock:
            if self._end is None or self._directory is None:
                raise ApiError(409, "no profile is running: begin one by /start_profile", code="no_profile")
            if self._end is not asyncio.current_task():
                self._end.cancel()
            self._end = None
            await asyncio.to_thread(jax.profiler.stop_trace)
        return self._directory

    async def _end_later(self) -> None:
        await asyncio.sleep(self._seconds)
        log.warning("a profile has run for %g s: ended", self._seconds)
        await self.stop()


def profiling_router(directory: str | None, seconds: float) -> APIRouter:
    """The two paths, over one `Profiler`."""
    router = APIRouter(tags=["operation"], dependencies=[Depends(admin_only)])
    profiler = Profiler(directory, seconds)

    @router.post("/start_profile")
    async def start_profile() -> dict[str, str]:
        """Begin a profile of the whole process."""
        return {"status": "profiling", "directory": await profiler.start()}

    @router.post("/stop_profile")
    async def stop_profile() -> dict[str, str]:
        """End the profile, and write it for XProf (or TensorBoard)."""
        return {"status": "written", "directory": await profiler.stop()}

    return router
