"""Plans by arithmetic, the command, and what it says where things do not fit."""

import json
import subprocess
import sys
from unittest import mock

import jax.numpy as jnp
import pytest
from rich.console import Console

from checkpoints.errors import CheckpointError
from checkpoints.load import load_config
from checkpoints.presets import PRESETS
from mamba_jax.model import HybridModel, parameters
from mamba_jax.sharding import Partition
from serving.capacity.count import Counter
from serving.capacity.plan import make_plan
from serving.capacity.report import as_comparison, as_text
from serving.capacity.targets import families, known, larger, target
from serving.cli.main import run
from serving.config import ConfigError, EngineConfig
from serving.engine.assembly.fetch import resolved_model
from serving.engine.assembly.sizing import CODE_PER_LAYER


def plan(model, topology, context=None, **flags):
    return make_plan(EngineConfig.create(model=model, **flags), target(topology), compile=False, context=context)


def test_what_fits_adds_up():
    made = plan("nemotron-h-8b", "v5e-8")
    assert made.fits
    assert not made.compiled
    parts = made.weights + made.store + made.code + made.temporaries + made.other
    assert parts + made.spare == made.limit
    # Two bytes for each of 8.1 billion numbers, over eight devices; norms and the like are on all of them.
    assert made.weights == pytest.approx(2 * made.parameters / 8, rel=0.01)
    assert made.size.max_num_seqs == 64


def test_adapters_take_memory():
    lora = {"enable_lora": True, "max_loras": 4}
    dora, tables = lora | {"enable_dora": True}, lora | {"lora_tables": True}
    plain, few, scaled, wide, many = (
        plan("nemotron-h-8b", "v5e-8", **flags) for flags in ({}, lora, dora, tables, tables | {"max_loras": 128})
    )
    adapters = few.other - plain.other
    assert 0 < adapters < scaled.other - plain.other
    # An embedding and a head for each, divided over the devices, and a flag for each entry.
    assert wide.other - few.other == 4 * 2 * 131072 * 4096 * 2 // 8 + 2 * 5
    assert wide.temporaries - few.temporaries == 2 * 64 * 131072 * 4, "the scores of a head of its own"
    assert wide.store < few.store <= plain.store - adapters + few.size.bytes_per_slot + few.size.bytes_per_page
    assert not many.fits


def test_code_is_reserved_on_tpu():
    assert plan("nemotron-h-8b", "h100-8").code == 0
    made = plan("nemotron-h-8b", "v5e-8")
    assert made.num_programs == 12
    decode, prefill, mixed = CODE_PER_LAYER["tpu"]
    assert made.code == 52 * (3 * decode + 6 * prefill + 3 * mixed)
    reserved = made.code + made.weights + made.temporaries
    assert made.store + reserved <= 0.9 * made.target.device.memory
    whole = plan("nemotron-h-8b", "v5e-8", enable_chunked_prefill=False)
    assert whole.num_programs > made.num_programs
    assert whole.code > made.code


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("model", "topology", "tokens"),
    [
        ("nemotron-3-nano-30b-a3b", "v6e-8", 4096), ("nemotron-3-nano-30b-a3b", "h200-1", 2048),
        ("qwen3-next-80b-a3b", "v6e-8", 8192),
    ],
)  # fmt: skip
def test_steps_read_experts_no_longer_than_they_multiply(model, topology, tokens):
    step = plan(model, topology).steps[0]
    assert step.tokens == tokens
    assert plan(model, topology, max_num_batched_tokens=512).steps[0].tokens == 512
    assert step.memory_ms < 3 * step.compute_ms


def test_long_contexts_are_bounded():
    flags = {"max_model_len": 1 << 20, "allow_long_max_model_len": True, "max_num_batched_tokens": 2048}
    made = plan("qwen3-next-80b-a3b", "v6e-16", **flags)
    few, more, most = made.long_contexts
    assert [each.tokens for each in made.long_contexts] == [1 << 17, 1 << 19, 1 << 20]
    assert most.sequences == made.sequences_at(1 << 20)[0]
    assert 6 * few.bytes < most.bytes <= 8 * few.bytes
    # Attention is most of a prompt of a million tokens: 12 layers of 16 heads of 256, over 16 devices.
    attention = 12 * 4 * 16 * 256 * 2**39 / 16 / made.target.device.flops
    assert attention < most.first_token_s < 1.5 * attention
    assert few.decode_ms < more.decode_ms < most.decode_ms
    # Steps of few tokens read every expert for each of them; with many keys, attention is most of a step.
    assert few.chunk > 2048
    assert few.chunked_first_token_s < 0.7 * few.first_token_s
    assert 0.9 * most.first_token_s < most.chunked_first_token_s <= most.first_token_s
    assert any(note.startswith("8 devices hold the same keys and values") for note in made.notes)
    console = Console(width=160)
    with console.capture() as shown:
        console.print(as_comparison([made], {}, None))
    assert f"{few.chunk:,}: {few.chunked_first_token_s:,.1f} s" in shown.get()
    assert plan("nemotron-h-8b", "v5e-8").long_contexts == ()


def test_what_does_not_fit_says_by_how_much():
    made = plan("nemotron-h-8b", "v5e-1")
    assert not made.fits
    assert made.size is None
    assert made.weights > made.limit  # more than there is: whatever else is needed is missing, too
    assert made.spare < made.limit - made.weights
    assert any("v5e-4" in note for note in made.notes)
    made = plan("nemotron-h-8b", "h100-1", max_model_len=8192, memory_utilization=0.2028)
    assert not made.fits
    assert made.spare < 0
    assert any("max_model_len 8,192 does not fit" in note for note in made.notes)


def test_the_bound_of_a_decode_step_is_what_it_must_read():
    made = plan("nemotron-h-8b", "v5e-8", max_num_seqs=8, replay_interval=1)
    (decode,) = (step for step in made.steps if step.name == "decode, 8 rows")
    states = 2 * 8 * made.size.bytes_per_slot  # read once, written once
    embedding = 131072 * 4096 * 2 // 8  # all but the embedding's rows that are looked up
    keys = 8 * made.context * 4 * 2 * 8 * 128 * 2 // 8
    assert decode.work.bytes == pytest.approx(made.weights - embedding + states + keys, rel=0.001)
    assert decode.bound_ms == max(decode.memory_ms, decode.compute_ms)
    assert decode.tokens_per_second == pytest.approx(8 / decode.bound_ms * 1e3)


def test_a_prefill_is_bound_by_its_products():
    made = plan("mamba2-2.7b", "h200-1")
    prefill = made.steps[0]
    products = 2 * made.parameters * prefill.tokens
    assert prefill.work.flops == pytest.approx(products, rel=0.06)  # fewer rows go through the head
    assert prefill.bound_ms == prefill.compute_ms == pytest.approx(1e3 * prefill.work.flops / 989e12)


def test_keys_and_values_in_8_bits_leave_room_for_more_tokens():
    wide, narrow = (plan("nemotron-h-8b", "v5e-8", max_num_seqs=16, kv_cache_dtype=kind) for kind in ("auto", "fp8"))
    assert 2 * narrow.size.bytes_per_page == wide.size.bytes_per_page
    assert narrow.size.num_pages * narrow.size.num_slots > wide.size.num_pages * wide.size.num_slots
    assert "keys and values in float8_e4m3fn" in narrow.dtype
    (few, many) = (made.steps[-1].work.bytes for made in (narrow, wide))
    assert many - few == 16 * wide.context * wide.size.bytes_per_page // wide.size.page_size // 2


def test_unused_experts_are_not_read_and_a_last_chunk_is_padded_until_members_divide_it():
    config = load_config("nemotron-3-nano-30b-a3b")
    shapes = parameters(HybridModel.abstract(config, dtype=jnp.bfloat16))
    whole, divided = (
        Counter(config, Partition.of(config, 1, members), shapes, ssm_dtype=jnp.dtype("float32")) for members in (1, 4)
    )
    one, many = (whole.decode(rows=rows, drafts=0, context=0).bytes for rows in (1, 256))
    assert one < 0.2 * whole.weight_bytes
    assert many > 0.9 * whole.weight_bytes
    first, second = (divided.prefill(tokens=tokens, rows=1, tile_size=128).flops for tokens in (1023, 1024))
    assert first == pytest.approx(second, rel=0.01)


GIB_OF_CODE = {
    **dict.fromkeys(["nemotron-3-super-120b-a12b", "granite-4.0-h-tiny", "granite-4.0-h-small", "qwen3.5-27b"], 2),
    **dict.fromkeys(["kimi-linear-48b-a3b", "jamba-1.5-large", "jamba-large-1.6"], 2),
    **dict.fromkeys(["qwen3-next-80b-a3b", "qwen3.5-35b-a3b", "ling-3.0-flash"], 3),
    **dict.fromkeys(["minimax-text-01", "minimax-m1-80k"], 3),
}
"""Published sizes with experts or delta rules: by the estimate, their code exceeds 1 GiB of a TPU with any shapes."""


@pytest.mark.smoke
@pytest.mark.parametrize("name", PRESETS)
def test_every_published_size_can_be_planned_with_its_code(name):
    made = plan(name, "h200-1")
    assert -(-plan(name, "v6e-1").code // (1 << 30)) == GIB_OF_CODE.get(name, 1)
    assert made.steps or not made.fits


def test_drafts_need_more_states():
    plain, drafting = (
        plan("nemotron-h-8b", "h100-2", max_num_seqs=16, replay_interval=1, **more)
        for more in ({}, {"speculative_method": "ngram", "num_speculative_tokens": 3})
    )
    assert drafting.size.running_slots == 4 * plain.size.running_slots
    assert drafting.steps[-1].work.bytes > plain.steps[-1].work.bytes


def test_a_plan_says_what_decoding_keeps():
    many, few = (plan("nemotron-h-8b", "h100-2", max_num_seqs=rows) for rows in (64, 1))
    assert many.size.replay_interval == 16
    assert any("decoding keeps a state every 16 tokens" in note for note in many.notes)
    assert few.size.replay_interval == 1
    assert any("replay_interval 1, chosen: replay would save" in note for note in few.notes)


def test_a_config_file_may_override_the_models_config(tmp_path, capsys):
    file = tmp_path / "flags.yaml"
    file.write_text("hf-overrides:\n  max_position_embeddings: 20000\nmax-num-seqs: 4\n")
    wanted = ["--model", "nemotron-h-8b", "--topology", "h100-1", "--analysis", "--json", "--config", str(file)]
    assert run(["plan", *wanted, "--at-context", "16000"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["fits"], report["compiled"]) == (True, False)
    assert (report["size"]["max_model_len"], report["size"]["max_num_seqs"]) == (20000, 4)


@pytest.mark.full
def test_padded_heads_are_in_the_plan(capsys):
    """20 query heads, 5 for each head of keys, become 24 on 8 devices: 3 on each."""
    wanted = ["plan", "--model", "falcon-h1-34b", "--analysis"]
    assert run([*wanted, "--topology", "v6e-8"]) == 0
    notice = "20 attention heads are padded with zeros to 24, which adds 1.1% to the weights"
    assert notice in " ".join(capsys.readouterr().out.split())
    made = {machine: plan("falcon-h1-34b", machine) for machine in ("v6e-4", "v6e-8")}
    assert made["v6e-4"].parameters == made["v6e-8"].parameters
    assert made["v6e-8"].weights * 8 > 1.01 * made["v6e-4"].weights * 4


def test_command_says_what_is_missing(capsys):
    wanted, members = ["plan", "--model", "nemotron-h-8b", "--analysis"], ["--context-parallel-size", "8"]
    for machine, *more in (["v5e-1"], ["v5e-8", *members]):
        assert run([*wanted, "--topology", machine, *more]) == 1
        said = " ".join(capsys.readouterr().out.split())
        assert ("does not fit" in said, "too little" in said) == (True, True)
        assert ("divided over 8 members" if more else "v5e-4") in said
    assert run([*wanted, "--topology", "v5e-8", *members, "--tensor-parallel-size", "8"]) == 2
    assert "context_parallel_size 8 with tensor_parallel_size 8: v5e-8 has 8" in capsys.readouterr().err


def test_command_finds_the_smallest_machine_of_each_kind(capsys, monkeypatch):
    groups = [["h200-1"], ["l4-1", "l4-2"], ["v5e-1"]]
    machines = [[target(name) for name in names] for names in groups]
    monkeypatch.setattr("serving.capacity.targets.families", lambda: machines)
    wanted = ["--model", "nemotron-h-8b", "--topology", "all", "--at-context", "4096", "--max-num-seqs", "32"]
    wanted += ["--memory-utilization", "0.7"]  # too little for one L4
    assert run(["plan", *wanted]) == 0
    text = capsys.readouterr().out
    rows = [line.split() for line in text.splitlines() if " GiB" in line]
    assert [row[0] for row in rows] == ["l4-2", "h200-1"], "by memory"
    assert all(int(row[-1]) > 0 for row in rows)
    assert "TPU v5e: v5e-1: does not fit" in text
    del machines[1:]
    assert run(["plan", *wanted, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["fits"]["h200-1"]["at_context"] == {"tokens": 4096, "sequences": 32, "limited_by": "max_num_seqs"}
    assert not report["does_not_fit"]
    machines[:] = [[target("v5e-16")]]
    assert run(["plan", "--model", "falcon-h1-0.5b", "--topology", "all", "--json"]) == 1
    assert "does not divide" in json.loads(capsys.readouterr().out)["does_not_fit"]["TPU v5e"]


def test_every_machine_is_in_one_group():
    assert [machine.name for group in families() for machine in group] == known()
    assert all(target(name).count >= 1 for name in known())  # as targets.toml spells them
    assert [each.name for each in larger(target("h100-2"))] == ["h100-4", "h100-8"]


def test_sequences_at_a_context_are_limited_by_pages_or_by_rows():
    made = plan("nemotron-h-8b", "h200-1", max_num_seqs=64)
    pages = made.size.num_pages - 1
    assert made.sequences_at(32) == (64, "max_num_seqs")
    sequences, limit = made.sequences_at(8000)
    assert (sequences, limit) == (pages // 250, "pages") or (sequences, limit) == (64, "max_num_seqs")
    assert f"room for {made.sequences_at(8192)[0]} at the full 8,192 tokens" in made.size.report()
    longer = made.sequences_at(10**6)
    assert longer == (pages // 31250, "pages")
    assert plan("mamba2-130m", "l4-1").sequences_at(10**6)[1] == "max_num_seqs"


def test_members_hold_more_context_and_read_it_faster():
    flags, four_members = {"model": "nemotron-3-nano-30b-a3b", "max_model_len": 1 << 18}, {"context_parallel_size": 4}
    one, four = (plan(topology="h100-8", context=1 << 18, **flags, **more) for more in ({}, four_members))
    assert four.weights > 3 * one.weights
    assert four.long_contexts[0].bytes < one.long_contexts[0].bytes
    assert any("; use --context-parallel-size 4 for 131,072 tokens: " in note for note in one.notes)
    console = Console(width=200)
    with console.capture() as capture:
        console.print(as_text(four))
    assert "keys and values divided over 4 members" in capture.get()
    few, again = (
        plan(topology=name, max_num_batched_tokens=4096, **flags, **more)
        for more, name in (({}, "h100-2"), (four_members, "h100-8"))
    )
    # A device has its results for 16 of 32 heads of 128, and as many before and after the exchange, in 32 + 32 tiles.
    assert again.temporaries - few.temporaries == 3 * (32 + 32) * 128 * 16 * 128 * 4
    recurrent = plan("mamba2-130m", "h100-8", **four_members)
    assert (recurrent.size.num_pages, *recurrent.sequences_at(1 << 20)) == (0, 64, "max_num_seqs")
    with pytest.raises(ConfigError, match=r"context_parallel_size 3 does not divide 8 device"):
        plan(topology="h100-8", **flags, context_parallel_size=3)


def test_decode_is_rated_at_the_rows_that_fit():
    """A full batch of long contexts does not fit: the speed is that of the sequences that do."""
    made = plan("nemotron-3-nano-30b-a3b", "h100-1", context=32768)
    rows, limit = made.sequences_at(32768)
    assert (rows < 64, limit) == (True, "pages")
    assert made.steps[-1].name == f"decode, {rows} rows"
    assert made.steps[-1].tokens_per_second == pytest.approx(rows / made.steps[-1].bound_ms * 1e3)


@pytest.mark.parametrize(
    ("name", "published", "quantization"),
    [
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "nemotron-3-nano-30b-a3b", None),
        ("nvidia/NVIDIA-Nemotron-Nano-9B-v2-FP8", "nemotron-nano-9b-v2", "fp8"),
        ("ibm-granite/granite-4.0-h-tiny", "granite-4.0-h-tiny", None),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "qwen3-next-80b-a3b", None),
        ("moonshotai/Kimi-Linear-48B-A3B-Instruct", "kimi-linear-48b-a3b", None),
        ("inclusionAI/Ling-3.0-flash", "ling-3.0-flash", None),
        ("tiiuae/Falcon-H1-7B-Base", "falcon-h1-7b", None),
        ("MiniMaxAI/MiniMax-Text-01-hf", "minimax-text-01", None),
        ("tiiuae/falcon-mamba-7b-instruct", "falcon-mamba-7b", None),
        ("state-spaces/mamba-2.8b-hf", "mamba-2.8b", None),
        ("ai21labs/AI21-Jamba-1.5-Mini", "jamba-1.5-mini", None),
        ("ai21labs/AI21-Jamba-Reasoning-3B", "jamba-reasoning-3b", None),
    ],
)
def test_a_hubs_name_stands_for_the_published_model(name, published, quantization, monkeypatch):
    offline = mock.Mock(side_effect=CheckpointError("cannot be reached"))
    monkeypatch.setattr("serving.engine.assembly.fetch.fetched", offline)
    config, notice = resolved_model(EngineConfig.create(model=name))
    assert (config.model, config.quantization) == (published, quantization)
    assert published in notice
    with pytest.raises(CheckpointError, match="cannot be reached"):
        resolved_model(EngineConfig.create(model=name, revision="v1"))


def test_published_models_are_listed(capsys):
    assert run(["plan", "--list-models"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(PRESETS)


@pytest.mark.parametrize(("topology", "extra"), [("v6e-8", "plan"), ("h200-8", "plan-gpu")])
@pytest.mark.parametrize("bootstrap", [False, True])
def test_without_the_compiler_the_extra_is_named(topology, extra, bootstrap, monkeypatch, tmp_path):
    """As it is installed with pip, or in the environment of bootstrap.py, which may have none."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    if bootstrap:
        (tmp_path / "installed").touch()
    said = f"MAMBA_JAX_EXTRAS={extra} python3 bootstrap.py" if bootstrap else rf"pip install '\.\[{extra}\]'"
    with pytest.raises(ConfigError, match=f"{said}.*--analysis"):
        make_plan(EngineConfig.create(model="nemotron-h-8b"), target(topology))


@pytest.mark.full
def test_planning_imports_no_server():
    code = "import serving.capacity.plan, sys; print({'fastapi', 'uvicorn', 'llguidance', 'orbax'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("name", "count", "topology"),
    [
        ("v5e-1", 1, "v5e:2x2"),  # the compiler knows no smaller slice; one of its devices is used
        ("v6e-8", 8, "v6e:2x4"), ("v5litepod-16", 16, "v5e:4x4"), ("V6E:2x4", 8, "v6e:2x4"), ("8xv6e", 8, "v6e:2x4"),
        ("v5p-8", 4, "v5p:2x2x1"), ("tpu7x-8", 8, "tpu7x:2x2x1"), ("tpu7x:2x2x1", 8, "tpu7x:2x2x1"),
        ("h100", 1, "h100:1x1x1"), ("4xH100", 4, "h100:1x1x4"), ("2xH100", 2, "h100:1x1x2"),
        ("H100-80GB x2", 2, "h100:1x1x2"), ("h200-8", 8, "h200:1x1x8"), ("8 x NVIDIA H200", 8, "h200:1x1x8"),
        ("a100-40gb-4", 4, None), ("a100-80gb-4", 4, None),
    ],
)  # fmt: skip
def test_names(name, count, topology):
    found = target(name)
    assert (found.count, found.topology) == (count, topology)


@pytest.mark.parametrize(
    ("name", "near"),
    [("v6-8", "v6e-8"), ("v6e-7", "v6e-8"), ("3xH100", "h100-4"), ("h100-16", "h100-8"), ("h100-3", "h100-4"),
     ("v9", None), ("", None), ("tpu", None)],
)  # fmt: skip
def test_unknown_names_list_the_known_and_a_near_miss_is_named(name, near):
    with pytest.raises(ConfigError, match=r"known are v5e-\{1,4,8.*h100-\{1,2,4,8\}") as error:
        target(name)
    assert near is None or f"did you mean '{near}'" in str(error.value)
