"""Bytes of a compiled program, read from its text."""

from tests.support.hlo_traffic import Traffic

TEXT = """\
HloModule jit_run, is_scheduled=true

%greedy (p: f32[8,1024]) -> s32[8] {
  %p = f32[8,1024]{1,0:T(8,128)} parameter(0)
  ROOT %best = s32[8]{0} reduce(%p), dimensions={1}
}

%random (q: f32[8,1024]) -> s32[8] {
  %q = f32[8,1024]{1,0:T(8,128)} parameter(0)
  %sorted = f32[8,1024]{1,0:T(8,128)} sort(%q), dimensions={1}
  ROOT %drawn = s32[8]{0} reduce(%sorted), dimensions={1}
}

%fused_scatter (a: f32[100,256], i: s32[4], u: f32[4,256]) -> f32[100,256] {
  %a = f32[100,256]{1,0} parameter(0)
  %i = s32[4]{0} parameter(1)
  %u = f32[4,256]{1,0} parameter(2)
  ROOT %put = f32[100,256]{1,0} scatter(%a, %i, %u), to_apply=%keep
}

%body (c: (s32[], f32[1024])) -> (s32[], f32[1024]) {
  %c = (s32[], f32[1024]{0}) parameter(0)
  %x = f32[1024]{0} get-tuple-element(%c), index=1
  %y = f32[1024]{0} negate(%x)
  ROOT %t = (s32[], f32[1024]{0}) tuple(%c, %y)
}

ENTRY %main (w: bf16[512,512], s: f32[100,256]) -> s32[8] {
  %w = bf16[512,512]{1,0:T(8,128)(2,1)} parameter(0), metadata={op_name="weights[0]"}
  %s = f32[100,256]{1,0} parameter(1), metadata={op_name="store.slots"}
  %fetch = (bf16[512,512]{1,0:T(8,128)(2,1)S(1)}, bf16[512,512]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%w)
  %near = bf16[512,512]{1,0:T(8,128)(2,1)S(1)} copy-done(%fetch)
  %dot = f32[8,1024]{1,0:T(8,128)S(1)} fusion(%near), kind=kOutput, calls=%none
  %sum = f32[8,1024]{1,0:T(8,128)S(1)} all-reduce(%dot), to_apply=%add
  %index = s32[4]{0:S(1)} constant({1,2,3,4})
  %part = f32[4,256]{1,0:S(1)} broadcast(%index), dimensions={0}
  %kept = f32[100,256]{1,0} fusion(%s, %index, %part), kind=kCustom, calls=%fused_scatter
  %call = f32[8]{0} custom-call(%kept, %part), backend_config={"cost_estimate":{"bytes_accessed":"5000"}}
  %start = (s32[], f32[1024]{0}) tuple(%call)
  %loop = (s32[], f32[1024]{0}) while(%start), body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %rare = (s32[], f32[1024]{0}) while(%start), body=%body
  ROOT %out = s32[8]{0} conditional(%call, %sum, %sum), branch_computations={%random, %greedy}
}
"""


def test_weights_count_once_and_parts_in_part():
    weight = 512 * 512 * 2  # fetched once; read again on the chip, which is free
    written = 4 * 256 * 4  # of a hundred rows, four
    kernel = 5000 - 4 * 256 * 4  # as it says itself, less what has been brought onto the chip
    rounds = 3 * 2 * 1024 * 4  # the loop of unknown length counts nothing
    greedy = 8 * 1024 * 4 + 8 * 4  # the cheaper branch
    assert Traffic(TEXT).total() == weight + written + kernel + rounds + greedy


def test_exchanges_in_branches_are_those_of_a_greedy_step():
    text = TEXT.replace("%drawn = s32[8]{0} reduce(%sorted)", "%drawn = s32[8]{0} all-gather(%sorted)")
    assert Traffic(text).count(["all-reduce", "all-gather"]) == {"all-reduce": 1}
    text = TEXT.replace("%best = s32[8]{0} reduce(%p)", "%best = s32[8]{0} all-gather(%p)")
    assert Traffic(text).count(["all-reduce", "all-gather"]) == {"all-reduce": 1, "all-gather": 1}


AHEAD = """\
HloModule jit_run, is_scheduled=true

ENTRY %main (w: s8[512,512], v: s4[512,512], x: bf16[8,512]) -> f32[8,512] {
  %w = s8[512,512]{1,0:T(8,128)(4,1)} parameter(0), metadata={op_name="weights[0]"}
  %v = s4[512,512]{1,0:T(8,128)(8,1)E(4)} parameter(1), metadata={op_name="weights[1]"}
  %x = bf16[8,512]{1,0} parameter(2), metadata={op_name="batch"}
  %early = (s8[512,512]{1,0:S(1)}, s8[512,512]{1,0}, u32[]{:S(2)}) copy-start(%w), cross_program_prefetch_index=0
  %near = s8[512,512]{1,0:S(1)} copy-done(%early)
  %bytes = s8[131072]{0} bitcast(%v)
  %fetch = ((s8[131072]{0}), s8[131072]{0:S(1)}, s32[]{:S(2)}) slice-start(%bytes), slice={[0:131072]}
  %fetched = s8[131072]{0:S(1)} slice-done(%fetch)
  %here = s4[512,512]{1,0:E(4)S(1)} bitcast(%fetched)
  %call = f32[8,512]{1,0} custom-call(%x, %here), backend_config={"cost_estimate":{"bytes_accessed":"155648"}}
  %dot = f32[8,512]{1,0} fusion(%call, %near), kind=kOutput, calls=%none
  %next = (s8[512,512]{1,0:S(1)}, s8[512,512]{1,0}, u32[]{:S(2)}) copy-start(%w)
  %later = s8[512,512]{1,0:S(1)} copy-done(%next)
  ROOT %out = f32[8,512]{1,0} add(%dot, %call)
}
"""


def test_what_was_fetched_before_counts_once():
    integers, small = 512 * 512, 512 * 512 // 2  # for the next run; in 4 bits, for the kernel
    result, rows = 8 * 512 * 4, 8 * 512 * 2
    kernel, dot, add = rows + result, 2 * result, 3 * result
    assert Traffic(AHEAD).total() == integers + small + kernel + dot + add
    assert Traffic(AHEAD).of_arguments(r"weights\[\d+\]") == integers + small
    assert Traffic(AHEAD).of_arguments(r"weights\[1\]") == small


def test_wide_copies_of_weights_count():
    copied = AHEAD.replace("%bytes = s8[131072]{0} bitcast(%v)", "%wide = bf16[512,512]{1,0} convert(%v)")
    copied = copied.replace("fusion(%call, %near)", "fusion(%call, %wide)")
    narrow, wide = 512 * 512 // 2, 512 * 512 * 2
    assert Traffic(copied).of_arguments(r"weights\[1\]") == narrow + 2 * wide
