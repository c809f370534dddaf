"""`/start_profile` and `/stop_profile`: for operators, one at a time, never for ever, and what they write."""

import asyncio
import time

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from serving.api.http import errors
from serving.api.http.endpoints.operation import Profiler, profiling_router
from serving.api.http.errors import ApiError
from serving.api.http.settings import ServerSettings


class OnlySettings:
    """All of a server's context that the paths look at."""

    def __init__(self, settings):
        self.settings = settings


def client_of(**settings):
    settings = ServerSettings.create(**settings)
    app = FastAPI()
    app.state.context = OnlySettings(settings)
    errors.install(app)
    app.include_router(profiling_router(settings.profile_dir, settings.profile_timeout))
    return TestClient(app)


def test_a_profile(tmp_path):
    with client_of(admin_key="secret", profile_dir=str(tmp_path)) as client:
        client.headers["authorization"] = "Bearer secret"
        assert client.post("/stop_profile").status_code == 409
        assert client.post("/start_profile").json() == {"status": "profiling", "directory": str(tmp_path)}
        assert client.post("/start_profile").status_code == 409
        assert client.post("/stop_profile").status_code == 200
    assert list(tmp_path.rglob("*.xplane.pb"))


@pytest.mark.parametrize(
    ("admin_key", "sent", "status"),
    [
        (None, None, 403),
        (None, "any", 403),
        ("secret", None, 401),
        ("secret", "client", 403),
        ("secret", "secret", 400),
    ],
)
def test_operators_only(admin_key, sent, status):
    with client_of(admin_key=admin_key, api_key="client") as client:
        headers = {"authorization": f"Bearer {sent}"} if sent else {}
        answer = client.post("/start_profile", headers=headers)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]


def test_a_profile_ends_by_itself(tmp_path):
    async def forgotten():
        profiler = Profiler(str(tmp_path), 0.05)
        await profiler.start()
        end = time.monotonic() + 60
        while time.monotonic() < end and not list(tmp_path.rglob("*.xplane.pb")):
            await asyncio.sleep(0.05)
        with pytest.raises(ApiError, match="no profile is running"):
            await profiler.stop()

    asyncio.run(forgotten())
    assert list(tmp_path.rglob("*.xplane.pb"))
