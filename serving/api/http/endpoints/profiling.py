"""`/start_profile` and `/stop_profile`: profiles of the device and the host, for XProf. Operators only."""

from __future__ import annotations

import asyncio
import logging

import jax
from fastapi import APIRouter, Depends

from serving.api.http.connection.keys import admin_only
from serving.api.http.errors import ApiError

log = logging.getLogger(__name__)


class Profiler:
    """Takes at most one profile of this process at a time, for at most `seconds`, because a profile stays in memory
    until it is written.

    Args:
        directory: folder for profiles; None refuses them.
        seconds: maximum duration of a profile.
    """

    def __init__(self, directory: str | None, seconds: float) -> None:
        self._directory, self._seconds = directory, seconds
        self._lock = asyncio.Lock()
        self._end: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Starts a profile. Returns its folder.

        Raises:
            ApiError: no folder for profiles is configured, or a profile is running.
        """
        if self._directory is None:
            raise ApiError(400, "no folder for profiles: start the server with --profile-dir", code="no_profile_dir")
        async with self._lock:
            if self._end is not None:
                raise ApiError(409, "a profile is running: end it with /stop_profile", code="profile_running")
            await asyncio.to_thread(jax.profiler.start_trace, self._directory)
            self._end = asyncio.create_task(self._end_later())
        return self._directory

    async def stop(self) -> str:
        """Ends the profile and writes it. Returns its folder.

        Raises:
            ApiError: no profile is running.
        """
        async with self._lock:
            if self._end is None or self._directory is None:
                raise ApiError(409, "no profile is running: start one with /start_profile", code="no_profile")
            if self._end is not asyncio.current_task():
                self._end.cancel()
            self._end = None
            await asyncio.to_thread(jax.profiler.stop_trace)
        return self._directory

    async def _end_later(self) -> None:
        await asyncio.sleep(self._seconds)
        log.warning("ended a profile after %g s", self._seconds)
        await self.stop()


def profiling_router(directory: str | None, seconds: float) -> APIRouter:
    """Returns a router with the two paths and one `Profiler`."""
    router = APIRouter(tags=["operation"], dependencies=[Depends(admin_only)])
    profiler = Profiler(directory, seconds)

    @router.post("/start_profile")
    async def start_profile() -> dict[str, str]:
        """Start a profile of the whole process."""
        return {"status": "profiling", "directory": await profiler.start()}

    @router.post("/stop_profile")
    async def stop_profile() -> dict[str, str]:
        """End the profile, and write it for XProf (or TensorBoard)."""
        return {"status": "written", "directory": await profiler.stop()}

    return router
