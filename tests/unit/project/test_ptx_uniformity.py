"""Branches that lanes may take differently, found in PTX."""

from __future__ import annotations

import pytest

from pagewire.tests.support.ptx_uniformity import find_divergences

_KERNEL = """
.visible .entry kernel(.param .u64 kernel_param_0)
{{
	ld.param.b64 	%rd1, [kernel_param_0];
	mov.u32 	%r1, %tid.x;
	and.b32 	%r2, %r1, 1;
	mul.wide.u32 	%rd2, %r2, 4;
	add.s64 	%rd3, %rd1, %rd2;
	ld.global.b32 	%r3, [%rd3];
	ld.global.b32 	%r4, [%rd1];
$L__BB0_1:
{sum}
	setp.gt.f32 	%p1, %r7, 0f00000000;
	{meeting}
	@%p1 bra 	$L__BB0_1;
	ret;
}}
"""
_PRODUCT = "	mul.f32 	%r5, %r3, %r4;\n	shfl.sync.bfly.b32 	%r6, %r5, 1, 31, -1;\n"
SUMS = {
    "symmetric": (_PRODUCT + "	add.f32 	%r7, %r5, %r6;", False),
    "contracted": (_PRODUCT + "	fma.rn.f32 	%r7, %r3, %r4, %r6;", True),
    "of-one-lane": (_PRODUCT + "	mov.b32 	%r7, %r5;", True),
    "of-all": ("	mul.f32 	%r7, %r4, %r4;", False),
    "of-another-value": (_PRODUCT + "	add.f32 	%r7, %r3, %r6;", True),
    "too-far": (_PRODUCT.replace(" 1,", " 2,") + "	add.f32 	%r7, %r5, %r6;", True),
    "of-the-warp": ("	redux.sync.add.s32 	%r7, %r3, -1;", False),
    "from-shared-memory": ("	ld.shared.b32 	%r7, [global_smem+16];", False),
}


@pytest.mark.parametrize(("total", "differs"), SUMS.values(), ids=SUMS)
def test_a_branch_on_what_differs_between_lanes_is_found(total, differs):
    found = find_divergences(_KERNEL.format(sum=total, meeting="bar.sync 	0;"))
    assert [each.thread_bits for each in found] == [1] * differs


@pytest.mark.parametrize(
    "reading",
    ["mov.u32 	%r7, %globaltimer_lo;", "ld.acquire.sys.global.b32 	%r7, [%rd1];"],
    ids=["clock", "what-others-write"],
)
def test_a_branch_on_what_changes_between_two_readings_is_found(reading):
    assert find_divergences(_KERNEL.format(sum=f"	{reading}", meeting="bar.sync 	0;"))


def test_lanes_that_meet_nowhere_on_the_way_may_part():
    kernel = _KERNEL.format(sum="	mov.b32 	%r7, %r3;", meeting="")
    assert not find_divergences(kernel)
    assert find_divergences(kernel.replace("mov.b32 	%r7, %r3", SUMS["of-one-lane"][0]))


def test_halves_of_a_number_are_summed_together():
    halves = """
	mov.b64 	{%r10, %r11}, %rd3;
	shfl.sync.bfly.b32 	%r12, %r10, 1, 31, -1;
	shfl.sync.bfly.b32 	%r13, %r11, 1, 31, -1;
	mov.b64 	%rd4, {%r12, %r13};
	max.s64 	%rd5, %rd3, %rd4;
	cvt.u32.u64 	%r7, %rd5;
"""
    meeting = "bar.sync 	0;"
    assert not find_divergences(_KERNEL.format(sum=halves, meeting=meeting))
    other = halves.replace("{%r12, %r13}", "{%r13, %r12}")
    assert find_divergences(_KERNEL.format(sum=other, meeting=meeting))


def test_what_comes_from_either_way_of_a_divergent_branch_differs():
    kernel = """
.visible .entry kernel()
{
	mov.u32 	%r1, %tid.x;
	setp.eq.s32 	%p1, %r1, 5;
	mov.b32 	%r2, 0;
	@%p1 bra 	$L__BB0_2;
	mov.b32 	%r2, 1;
$L__BB0_2:
	setp.eq.s32 	%p2, %r2, 1;
	@%p2 bra 	$L__BB0_4;
	bar.sync 	0;
$L__BB0_4:
	ret;
}
"""
    assert [each.predicate for each in find_divergences(kernel)] == ["%p2"]
    assert not find_divergences(kernel.replace("%tid.x", "%ctaid.x"))
