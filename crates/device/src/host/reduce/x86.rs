//! f32, f16 and bf16 with their f32 accumulators in AVX2 or AVX-512 registers.
//!
//! One generic loop ([`reduce`]); a [`Vector`] says what a register does, a [`Storage`] how elements get in and out
//! of it. What is left over at the end goes through the portable loop, which computes the same bits.

#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "the bodies are intrinsics, unsafe for the same reason as their function"
)]

use std::arch::x86_64::*;

use antiphon_tensor::{DType, Element, bf16, f16, round};

use super::{
    Kernel,
    arithmetic::{self, InF32},
    portable,
};
use crate::{ReduceOp, host::cpu::Simd};

/// Registers in flight: enough to hide the latency of an addition behind the loads.
const UNROLL: usize = 4;

/// A register of f32 accumulators. Every method needs the instructions that the register is named after.
trait Vector: Copy {
    const LANES: usize;
    unsafe fn load_f32(from: *const f32) -> Self;
    unsafe fn store_f32(self, to: *mut f32);
    unsafe fn load_f16(from: *const u16) -> Self;
    unsafe fn store_f16(self, to: *mut u16);
    unsafe fn load_bf16(from: *const u16) -> Self;
    unsafe fn store_bf16(self, to: *mut u16);
    unsafe fn splat(value: f32) -> Self;
    unsafe fn add(self, other: Self) -> Self;
    unsafe fn mul(self, other: Self) -> Self;
    unsafe fn div(self, other: Self) -> Self;
    /// IEEE minimum: NaN wins, −0 < +0.
    unsafe fn minimum(self, other: Self) -> Self;
    /// IEEE maximum: NaN wins, −0 < +0.
    unsafe fn maximum(self, other: Self) -> Self;
    /// NaN becomes the canonical one.
    unsafe fn canonical(self) -> Self;
}

impl Vector for __m512 {
    const LANES: usize = 16;

    #[inline(always)]
    unsafe fn load_f32(from: *const f32) -> Self {
        _mm512_loadu_ps(from)
    }
    #[inline(always)]
    unsafe fn store_f32(self, to: *mut f32) {
        _mm512_storeu_ps(to, self)
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        _mm512_cvtph_ps(_mm256_loadu_si256(from.cast()))
    }
    #[inline(always)]
    unsafe fn store_f16(self, to: *mut u16) {
        _mm256_storeu_si256(to.cast(), _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT }>(self))
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
    }
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut u16) {
        // Round to nearest even: add half an ulp less one, plus the bit that will be the last. A canonical NaN
        // survives: 0x7FC00000 + 0x7FFF does not carry into the exponent.
        let bits = _mm512_castps_si512(self);
        let last = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(last, _mm512_set1_epi32(0x7FFF)));
        _mm256_storeu_si256(to.cast(), _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(rounded)));
    }
    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        _mm512_set1_ps(value)
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        _mm512_add_ps(self, other)
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        _mm512_mul_ps(self, other)
    }
    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        _mm512_div_ps(self, other)
    }
    #[inline(always)]
    unsafe fn minimum(self, other: Self) -> Self {
        let equal = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(self, other);
        let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(self, other);
        let ordered = _mm512_mask_or_ps(_mm512_min_ps(self, other), equal, self, other);
        _mm512_mask_blend_ps(nan, ordered, Self::splat(f32::NAN))
    }
    #[inline(always)]
    unsafe fn maximum(self, other: Self) -> Self {
        let equal = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(self, other);
        let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(self, other);
        let ordered = _mm512_mask_and_ps(_mm512_max_ps(self, other), equal, self, other);
        _mm512_mask_blend_ps(nan, ordered, Self::splat(f32::NAN))
    }
    #[inline(always)]
    unsafe fn canonical(self) -> Self {
        let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(self, self);
        _mm512_mask_blend_ps(nan, self, Self::splat(f32::from_bits(round::F32_NAN)))
    }
}

impl Vector for __m256 {
    const LANES: usize = 8;

    #[inline(always)]
    unsafe fn load_f32(from: *const f32) -> Self {
        _mm256_loadu_ps(from)
    }
    #[inline(always)]
    unsafe fn store_f32(self, to: *mut f32) {
        _mm256_storeu_ps(to, self)
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        _mm256_cvtph_ps(_mm_loadu_si128(from.cast()))
    }
    #[inline(always)]
    unsafe fn store_f16(self, to: *mut u16) {
        _mm_storeu_si128(to.cast(), _mm256_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT }>(self))
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
    }
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut u16) {
        let bits = _mm256_castps_si256(self);
        let last = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(last, _mm256_set1_epi32(0x7FFF)));
        let high = _mm256_srli_epi32::<16>(rounded);
        // The pack works within 128-bit halves: gather their low quarters.
        let packed = _mm256_permute4x64_epi64::<0b1000>(_mm256_packus_epi32(high, high));
        _mm_storeu_si128(to.cast(), _mm256_castsi256_si128(packed));
    }
    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        _mm256_set1_ps(value)
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        _mm256_add_ps(self, other)
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        _mm256_mul_ps(self, other)
    }
    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        _mm256_div_ps(self, other)
    }
    #[inline(always)]
    unsafe fn minimum(self, other: Self) -> Self {
        let equal = _mm256_cmp_ps::<_CMP_EQ_OQ>(self, other);
        let nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(self, other);
        let ordered = _mm256_blendv_ps(_mm256_min_ps(self, other), _mm256_or_ps(self, other), equal);
        _mm256_blendv_ps(ordered, Self::splat(f32::NAN), nan)
    }
    #[inline(always)]
    unsafe fn maximum(self, other: Self) -> Self {
        let equal = _mm256_cmp_ps::<_CMP_EQ_OQ>(self, other);
        let nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(self, other);
        let ordered = _mm256_blendv_ps(_mm256_max_ps(self, other), _mm256_and_ps(self, other), equal);
        _mm256_blendv_ps(ordered, Self::splat(f32::NAN), nan)
    }
    #[inline(always)]
    unsafe fn canonical(self) -> Self {
        let nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(self, self);
        _mm256_blendv_ps(self, Self::splat(f32::from_bits(round::F32_NAN)), nan)
    }
}

/// How elements of a dtype get in and out of a register.
trait Storage: Element {
    unsafe fn load<V: Vector>(from: *const Self) -> V;
    unsafe fn store<V: Vector>(to: *mut Self, value: V);
}

macro_rules! storage {
    ($($t:ty, $load:ident, $store:ident;)*) => {$(
        impl Storage for $t {
            #[inline(always)]
            unsafe fn load<V: Vector>(from: *const Self) -> V {
                V::$load(from.cast())
            }
            #[inline(always)]
            unsafe fn store<V: Vector>(to: *mut Self, value: V) {
                value.$store(to.cast())
            }
        }
    )*};
}

storage! {
    f32, load_f32, store_f32;
    f16, load_f16, store_f16;
    bf16, load_bf16, store_bf16;
}

/// A binary operator on registers; the scalar form of the same operator finishes the tail.
trait CombineVectors: arithmetic::Combine<f32> {
    unsafe fn combine_vectors<V: Vector>(left: V, right: V) -> V;
}

macro_rules! combine_vectors {
    ($($op:ident, $method:ident;)*) => {$(
        impl CombineVectors for arithmetic::$op {
            #[inline(always)]
            unsafe fn combine_vectors<V: Vector>(left: V, right: V) -> V {
                left.$method(right)
            }
        }
    )*};
}

combine_vectors! {
    Sum, add;
    Prod, mul;
    Min, minimum;
    Max, maximum;
}

/// Reduces whole blocks of `UNROLL` registers from `start` on; returns the first element that is left.
#[inline(always)]
unsafe fn reduce_blocks<V: Vector, S: Storage, C: CombineVectors, const UNROLL: usize>(
    destination: *mut u8,
    sources: &[*const u8],
    start: usize,
    count: usize,
    mean: bool,
) -> usize {
    let (first, rest) = sources.split_first().expect("a reduction has a source");
    let block = V::LANES * UNROLL;
    let mut begin = start;
    // SAFETY: the loop stays below `count`, for which the caller vouches. All reads of a block come before its writes,
    // so the destination may be a source.
    unsafe {
        while begin + block <= count {
            let load =
                |source: *const u8, k: usize| S::load::<V>(source.cast::<S>().add(begin + k * V::LANES));
            let mut sums: [V; UNROLL] = std::array::from_fn(|k| load(*first, k));
            for &source in rest {
                for (k, sum) in sums.iter_mut().enumerate() {
                    *sum = C::combine_vectors(*sum, load(source, k));
                }
            }
            for (k, sum) in sums.into_iter().enumerate() {
                let value = if mean { sum.div(V::splat(sources.len() as f32)) } else { sum };
                S::store(destination.cast::<S>().add(begin + k * V::LANES), value.canonical());
            }
            begin += block;
        }
    }
    begin
}

/// Reduces whole registers; returns the first element that is left.
#[inline(always)]
unsafe fn reduce<V: Vector, S: Storage, C: CombineVectors>(
    destination: *mut u8,
    sources: &[*const u8],
    start: usize,
    count: usize,
    mean: bool,
) -> usize {
    // SAFETY: passed on to the caller.
    unsafe {
        let left = reduce_blocks::<V, S, C, UNROLL>(destination, sources, start, count, mean);
        reduce_blocks::<V, S, C, 1>(destination, sources, left, count, mean)
    }
}

#[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn avx512<S: Storage, C: CombineVectors>(
    destination: *mut u8,
    sources: &[*const u8],
    start: usize,
    count: usize,
    mean: bool,
) where
    InF32: arithmetic::Domain<S, Accumulator = f32>,
{
    // SAFETY: passed on to the caller; this function has the instructions.
    unsafe {
        let left = reduce::<__m512, S, C>(destination, sources, start, count, mean);
        portable::avx512::<S, InF32, C>(destination, sources, left, count, mean);
    }
}

#[target_feature(enable = "avx2,f16c")]
unsafe fn avx2<S: Storage, C: CombineVectors>(
    destination: *mut u8,
    sources: &[*const u8],
    start: usize,
    count: usize,
    mean: bool,
) where
    InF32: arithmetic::Domain<S, Accumulator = f32>,
{
    // SAFETY: passed on to the caller; this function has the instructions.
    unsafe {
        let left = reduce::<__m256, S, C>(destination, sources, start, count, mean);
        portable::avx2::<S, InF32, C>(destination, sources, left, count, mean);
    }
}

/// The kernel of a dtype and operator, if it is one of this file's.
pub(super) fn select(dtype: DType, op: ReduceOp, simd: Simd) -> Option<Kernel> {
    match dtype {
        DType::F32 => by_op::<f32>(op, simd),
        DType::F16 => by_op::<f16>(op, simd),
        DType::BF16 => by_op::<bf16>(op, simd),
        _ => None,
    }
}

fn by_op<S: Storage>(op: ReduceOp, simd: Simd) -> Option<Kernel>
where
    InF32: arithmetic::Domain<S, Accumulator = f32>,
{
    match op {
        ReduceOp::Sum | ReduceOp::Avg => by_simd::<S, arithmetic::Sum>(simd),
        ReduceOp::Prod => by_simd::<S, arithmetic::Prod>(simd),
        ReduceOp::Min => by_simd::<S, arithmetic::Min>(simd),
        ReduceOp::Max => by_simd::<S, arithmetic::Max>(simd),
        _ => None,
    }
}

fn by_simd<S: Storage, C: CombineVectors>(simd: Simd) -> Option<Kernel>
where
    InF32: arithmetic::Domain<S, Accumulator = f32>,
{
    match simd {
        Simd::Avx512 => Some(avx512::<S, C>),
        Simd::Avx2 => Some(avx2::<S, C>),
        Simd::Baseline => None,
    }
}
