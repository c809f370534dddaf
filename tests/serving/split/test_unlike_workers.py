"""Workers that differ, as whole processes: those that may exchange states do, and the others are told why not."""

import httpx
import openai
import pytest

from tests.support.fleets.processes import router, running, streamed, worker

pytestmark = pytest.mark.slow

TEXT = "The prefill worker computes the prompt once and the decode worker goes on from its state. " * 2


@pytest.mark.parametrize(("there", "here"), [(2, 1), (1, 2)], ids=["2 to 1", "1 to 2"])
def test_numbers_of_devices(there, here, tmp_path):
    """States go from two devices to one and back by logical arrays: tokens are those of one server of one device."""
    prefill = worker("prefill", tmp_path, devices=there, tensor_parallel_size=there)
    decode = worker("decode", tmp_path, devices=here, tensor_parallel_size=here, page_size=32)
    fronts = [router([prefill], [decode], tmp_path, f"--handoff={each}") for each in ("full", "recompute-last")]
    alone = worker("", tmp_path)
    with running(prefill, decode, *fronts, alone):
        shards = [each.get("/split/manifest")["shards"] for each in (prefill, decode)]
        assert shards == [there, here]
        texts = ["ab", "To be or not to be", TEXT]
        for front in fronts:
            for number, text in enumerate(texts):
                text = f"{front.port} {number} {text}"
                assert streamed(front, text) == streamed(alone, text), text
        stats = decode.get("/split/status")
        assert (stats["arrived"], stats["failed"]) == (len(fronts) * len(texts), 0)
        assert prefill.idle()
        assert decode.idle()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"ssm_dtype": "bfloat16"}, "ssm_dtype differs: prefill has float32, decode has bfloat16"),
        ({"load_format": "dummy"}, "model differs: prefill has"),
    ],
    ids=["state dtype", "model"],
)
def test_a_mismatch_is_one_line_on_both_sides(options, says, tmp_path):
    prefill, decode = worker("prefill", tmp_path), worker("decode", tmp_path, **options)
    patient = router([prefill], [decode], tmp_path)
    strict = router([prefill], [decode], tmp_path, "--on-failure=fail")
    with running(prefill, decode, patient, strict):
        message = {"kind": "completions", "body": {"model": "demo", "prompt": TEXT}}
        ticket = httpx.post(f"{prefill.url}/split/prefill", json=message, timeout=60).json()
        refused = httpx.post(f"{decode.url}/split/expect", json=ticket, timeout=60)
        assert refused.status_code == 409
        assert says in refused.json()["error"]["message"]
        for each in (prefill, decode):
            (line,) = [line for line in each.log().splitlines() if "refused" in line]
            assert says in line
        # The router detects the mismatch and logs it once. The policy says whether requests are computed here or fail.
        assert len(streamed(patient, TEXT)) == 16
        assert patient.get("/status")["relay"]["alone"] == 1
        with pytest.raises(openai.InternalServerError, match="no prefill worker is available"):
            streamed(strict, TEXT)
        for front in (patient, strict):
            (pair,) = front.get("/status")["mismatched"]
            assert says in pair["why"]
            assert sum(says in line for line in front.log().splitlines()) == 1
