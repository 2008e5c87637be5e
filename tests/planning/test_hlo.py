"""Reading XLA's text: loops, collectives in their synchronous and asynchronous forms, kernels, aliases."""

from __future__ import annotations

import pytest

from cfprm_jax.planning.hlo import Collective, CompiledText, array_bytes

TEXT = """HloModule jit_step, input_output_alias={ {0}: (0, {}, may-alias), {1}: (2, {}, must-alias) }

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%inner (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %ar = f32[8]{0} all-reduce(%p), channel_id=1, to_apply=%add
}

%body (carry: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %carry = (s32[], bf16[4,8]{1,0}) parameter(0)
  %x = bf16[4,8]{1,0} get-tuple-element(%carry), index=1
  %start = (bf16[4,8]{1,0}, /*index=1*/bf16[16,8]{1,0}) all-gather-start(%x), channel_id=2, dimensions={0}
  %done = bf16[16,8]{1,0} all-gather-done(%start)
  %rs = bf16[4,8]{1,0:T(8,128)} reduce-scatter(%done), channel_id=3, dimensions={0}, to_apply=%add
  %f = f32[8]{0} fusion(%rs), kind=kLoop, calls=%inner
  %o = (f32[2]{0}, u8[0]{0}) custom-call(%f), custom_call_target="__cudnn$fmhaSoftmax", backend_config={"a":{"b":1}}
  ROOT %t = (s32[], bf16[4,8]{1,0}) tuple(%carry, %rs)
}

%cond (carry: (s32[], bf16[4,8])) -> pred[] {
  %carry = (s32[], bf16[4,8]{1,0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

%called (q: bf16[4,8]) -> bf16[4,8] {
  %q = bf16[4,8]{1,0} parameter(0)
  ROOT %swap = bf16[4,8]{1,0} all-to-all(%q), channel_id=5, dimensions={0}
}

%first (r: bf16[4,8]) -> bf16[4,8] {
  %r = bf16[4,8]{1,0} parameter(0)
  ROOT %same = bf16[4,8]{1,0} call(%r), to_apply=%called
}

%second (s: bf16[4,8]) -> bf16[4,8] {
  %s = bf16[4,8]{1,0} parameter(0)
  %k = f32[2]{0} custom-call(%s), custom_call_target="in_a_branch"
  ROOT %n = bf16[4,8]{1,0} negate(%s)
}

ENTRY %main (p0: bf16[4,8], p1: s32[]) -> bf16[4,8] {
  %p0 = bf16[4,8]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %init = (s32[], bf16[4,8]{1,0}) tuple(%p1, %p0)
  %loop = (s32[], bf16[4,8]{1,0}) while(%init), condition=%cond, body=%body, b={"known_trip_count":{"n":"28"}}
  %k = f32[2]{0} custom-call(%p0), custom_call_target="tpu_custom_call", m={op_name="jit(f)/splash_fwd/pallas_call"}
  %perm = ((bf16[4,8]{1,0}), bf16[4,8]{1,0}) collective-permute-start(%p0), channel_id=4
  %kept = bf16[4,8]{1,0} call(%p0), to_apply=%called, frontend_attributes={inlineable="false"}
  %either = bf16[4,8]{1,0} conditional(%p1, %p0, %p0), branch_computations={%first, %second}
  %several = bf16[4,8]{1,0} async-start(%p0), called_computations={%first, %second}
  ROOT %out = bf16[4,8]{1,0} get-tuple-element(%loop), index=1
}
"""


@pytest.mark.parametrize(
    ("text", "size"),
    [("bf16[4,8]{1,0}", 64), ("f32[]", 4), ("(s8[3], pred[2])", 5), ("s4[8]", 4), ("f8e4m3fn[16]", 16), ("token[]", 0)],
)
def test_array_bytes(text: str, size: int) -> None:
    assert array_bytes(text) == size


def test_a_loop_counts_as_often_as_it_runs() -> None:
    program = CompiledText(TEXT)
    assert program.runs["body"] == program.runs["inner"] == 28
    assert program.collectives() == {
        "all-gather": Collective(28, 28 * 16 * 8 * 2),  # what it gives, not what it was given
        "reduce-scatter": Collective(28, 28 * 16 * 8 * 2),  # what it takes
        "all-reduce": Collective(28, 28 * 8 * 4),
        "all-to-all": Collective(3, 3 * 4 * 8 * 2),
        "collective-permute": Collective(1, 4 * 8 * 2),
    }
    assert list(program.collectives())[:3] == ["all-gather", "reduce-scatter", "all-reduce"]


def test_calls_and_branches_are_followed() -> None:
    """A call by itself, in a branch, and in a list; what a reduction does to two numbers is not counted."""
    runs = CompiledText(TEXT).runs
    assert (runs["called"], runs["first"], runs["second"]) == (3, 2, 2)
    assert runs["add"] == 0
    assert CompiledText(TEXT).kernels()["in_a_branch"] == 2


def test_the_count_of_a_loop_in_its_condition() -> None:
    """As in the text of a TPU's program."""
    text = TEXT.replace(', b={"known_trip_count":{"n":"28"}}', "").replace(
        "ROOT %less = pred[] constant(true)",
        """%most = s32[]{:T(128)} constant(7)
  %i = s32[]{:T(128)} get-tuple-element(%carry), index=0
  ROOT %less = pred[]{:T(512)} compare(%i, %most), direction=LT""",
    )
    assert CompiledText(text).runs["inner"] == 7
    assert CompiledText(TEXT.replace('"n":"28"', '"m":"28"')).runs["inner"] == 1


def test_kernels() -> None:
    program = CompiledText(TEXT)
    assert program.kernels() == {"__cudnn$fmhaSoftmax": 28, "splash_fwd": 1, "in_a_branch": 2}
    assert program.attention_kernels() == {"__cudnn$fmhaSoftmax": 28, "splash_fwd": 1}


def test_aliases() -> None:
    assert CompiledText(TEXT).aliased() == 2
    assert CompiledText("HloModule x\n").aliased() == 0
    assert CompiledText("").collectives() == {}
