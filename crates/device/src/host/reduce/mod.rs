//! The element-wise reduction of any number of sources: the arithmetic of every collective.
//!
//! For each element: take it from the sources in the order given, widen it, combine, and round once at the end (the
//! rule on this crate's first page). Each element is independent of its neighbours, so the result does not depend
//! on vector width, blocking or alignment. That is why one-shot and two-shot algorithms agree to the last bit.
//!
//! | file | what |
//! | --- | --- |
//! | `arithmetic` | what widening, combining and rounding mean for each dtype: the definition |
//! | `portable` | any dtype and operator, through an accumulator tile that stays in the L1 cache |
//! | `x86` | f32, f16 and bf16 with the accumulators in AVX2 or AVX-512 registers |

mod arithmetic;
mod portable;
#[cfg(target_arch = "x86_64")]
mod x86;

use antiphon_tensor::{DType, Element, bf16, f16};
use arithmetic::{Band, Bor, Bxor, InF32, InF64, InI64, Max, Min, Native, Prod, Sum};

use crate::{ReduceOp, host::cpu::Simd};

/// Reduces `sources` into `destination` from element `start` to `count` (exclusive), dividing by the number of
/// sources if `mean`. All pointers are valid for `count` elements of the type; the destination may be one of the
/// sources, but may not overlap one in any other way.
type Kernel = unsafe fn(destination: *mut u8, sources: &[*const u8], start: usize, count: usize, mean: bool);

/// As [`Kernel`], from element 0 on, in the order that [`Reducer::run_by_node`] states.
type NodeKernel =
    unsafe fn(destination: *mut u8, sources: &[*const u8], nodes: &[u32], count: usize, mean: bool);

/// The first half of a reduction: accumulates `count` elements of the sources into accumulators, which are valid for writing, at any
/// alignment, and apart from the sources.
type Accumulate = unsafe fn(sums: *mut u8, sources: &[*const u8], count: usize);

/// The second half: combines accumulators, divides them by the divisor if there is one, and rounds.
type Conclude = unsafe fn(destination: *mut u8, sums: &[*const u8], count: usize, divisor: Option<usize>);

/// What is compiled for any dtype, operator and level of vector instructions.
#[derive(Clone, Copy)]
struct Portable {
    kernel: Kernel,
    by_node: NodeKernel,
    accumulate: Accumulate,
    conclude: Conclude,
    /// The size of an accumulator.
    accumulator: usize,
}

/// A reduction of one dtype by one operator, ready to run.
///
/// Choosing it looks at the machine once; running it allocates nothing.
#[derive(Debug, Clone, Copy)]
pub struct Reducer {
    kernel: Kernel,
    mean: bool,
    dtype: DType,
    op: ReduceOp,
    simd: Simd,
}

impl Reducer {
    /// The fastest reduction of this machine.
    pub fn new(dtype: DType, op: ReduceOp) -> Self {
        Self::with_simd(dtype, op, Simd::widest())
    }

    /// The reduction that uses at most the vector instructions of `simd`, which must be
    /// [available](Simd::available). All levels give the same bits.
    pub fn with_simd(dtype: DType, op: ReduceOp, simd: Simd) -> Self {
        assert!(simd <= Simd::widest(), "{simd:?} is not available here: widest is {:?}", Simd::widest());
        Self { kernel: select(dtype, op, simd), mean: op == ReduceOp::Avg, dtype, op, simd }
    }

    /// Reduces `count` elements.
    ///
    /// # Safety
    /// `destination` is valid for writes and every source for reads of `count` elements of the dtype, at any
    /// alignment, and no other thread writes the sources meanwhile. The destination may be exactly one of the sources, but
    /// must not overlap a source otherwise. There is at least one source.
    #[inline]
    pub unsafe fn run(&self, destination: *mut u8, sources: &[*const u8], count: usize) {
        debug_assert!(!sources.is_empty());
        // SAFETY: passed on to the caller.
        unsafe { (self.kernel)(destination, sources, 0, count, self.mean) }
    }

    /// Reduces `count` elements of sources that are on several nodes: `nodes` has the node of each source. The sources of each node are
    /// accumulated in their order, and then the nodes' accumulators in the order of the nodes' first sources; it is rounded once.
    ///
    /// # Safety
    /// As [`run`](Self::run).
    ///
    /// # Panics
    /// When there is not one node for each source.
    pub unsafe fn run_by_node(
        &self,
        destination: *mut u8,
        sources: &[*const u8],
        nodes: &[u32],
        count: usize,
    ) {
        assert_eq!(sources.len(), nodes.len(), "one node for each source");
        // Chosen here, so that ranks of one node do not pay for it.
        let Portable { by_node, .. } = self.portable();
        // SAFETY: passed on to the caller.
        unsafe { by_node(destination, sources, nodes, count, self.mean) }
    }

    fn portable(&self) -> Portable {
        select_portable(self.dtype, self.op, self.simd)
    }

    /// The size in bytes of an element's accumulator.
    pub fn accumulator_size(&self) -> usize {
        self.portable().accumulator
    }

    /// The first half of [`run_by_node`](Self::run_by_node), on the node that has these sources: `count` accumulators, not rounded.
    ///
    /// # Safety
    /// `sums` is valid for writes of `count` [accumulators](Self::accumulator_size), at any alignment, and apart from the sources. The
    /// rest as for [`run`](Self::run).
    pub unsafe fn accumulate(&self, sums: *mut u8, sources: &[*const u8], count: usize) {
        // SAFETY: passed on to the caller.
        unsafe { (self.portable().accumulate)(sums, sources, count) }
    }

    /// The second half: `count` elements from the accumulators of all nodes, in the order of the nodes. The accumulators stem from
    /// `sources` sources. Both halves give the bits of [`run_by_node`](Self::run_by_node).
    ///
    /// # Safety
    /// Every one of `sums` is valid for reads of `count` accumulators, at any alignment, and the destination for writes of `count` elements
    /// apart from them; no other thread writes them meanwhile. There is at least one.
    pub unsafe fn conclude(&self, destination: *mut u8, sums: &[*const u8], sources: usize, count: usize) {
        let divisor = self.mean.then_some(sources);
        // SAFETY: passed on to the caller.
        unsafe { (self.portable().conclude)(destination, sums, count, divisor) }
    }
}

/// Reduces slices of equal length: the safe form, for tests and small work.
///
/// # Panics
/// When there is no source, or a length differs from the destination's.
pub fn reduce<T: Element>(op: ReduceOp, destination: &mut [T], sources: &[&[T]]) {
    assert!(!sources.is_empty(), "a reduction needs a source");
    for source in sources {
        assert_eq!(source.len(), destination.len(), "all lengths must be equal");
    }
    let pointers: Vec<*const u8> = sources.iter().map(|s| s.as_ptr().cast()).collect();
    // SAFETY: the slices are valid for their common length, and the borrow rules keep them apart.
    unsafe { Reducer::new(T::DTYPE, op).run(destination.as_mut_ptr().cast(), &pointers, destination.len()) }
}

/// The kernel of a dtype and an operator at a level of vector instructions, for sources of one node.
fn select(dtype: DType, op: ReduceOp, simd: Simd) -> Kernel {
    #[cfg(target_arch = "x86_64")]
    if let Some(kernel) = x86::select(dtype, op, simd) {
        return kernel;
    }
    select_portable(dtype, op, simd).kernel
}

/// The portable kernels of a dtype and an operator.
fn select_portable(dtype: DType, op: ReduceOp, simd: Simd) -> Portable {
    // `Native` wraps in the type itself, which for sums and products equals wrapping in i64 and truncating; only the
    // mean needs the wide sum.
    macro_rules! by_op {
        ($t:ty, $domain:ty, $mean:ty $(, $bitwise:ident)?) => {
            match op {
                $(op if op.is_bitwise() => $bitwise::<$t>(op, simd),)?
                ReduceOp::Sum => by_simd::<$t, $domain, Sum>(simd),
                ReduceOp::Prod => by_simd::<$t, $domain, Prod>(simd),
                ReduceOp::Min => by_simd::<$t, $domain, Min>(simd),
                ReduceOp::Max => by_simd::<$t, $domain, Max>(simd),
                ReduceOp::Avg => by_simd::<$t, $mean, Sum>(simd),
                op => unreachable!("{op} is for integers; collectives reject it before for {dtype}"),
            }
        };
    }
    match dtype {
        DType::F64 => by_op!(f64, InF64, InF64),
        DType::F32 => by_op!(f32, InF32, InF32),
        DType::F16 => by_op!(f16, InF32, InF32),
        DType::BF16 => by_op!(bf16, InF32, InF32),
        DType::I64 => by_op!(i64, Native, InI64, bitwise),
        DType::I32 => by_op!(i32, Native, InI64, bitwise),
        DType::I8 => by_op!(i8, Native, InI64, bitwise),
        DType::U8 => by_op!(u8, Native, InI64, bitwise),
        other => unreachable!("the dtype {other} has no arithmetic; collectives reject it before"),
    }
}

/// The kernels of an operator on bits.
fn bitwise<T: Element>(op: ReduceOp, simd: Simd) -> Portable
where
    Native: arithmetic::Domain<T, Accumulator = T>,
    Band: arithmetic::Combine<T>,
    Bor: arithmetic::Combine<T>,
    Bxor: arithmetic::Combine<T>,
{
    match op {
        ReduceOp::Band => by_simd::<T, Native, Band>(simd),
        ReduceOp::Bor => by_simd::<T, Native, Bor>(simd),
        _ => by_simd::<T, Native, Bxor>(simd),
    }
}

/// The portable kernels compiled for a level of vector instructions.
fn by_simd<T, D, C>(simd: Simd) -> Portable
where
    T: Element,
    D: arithmetic::Domain<T>,
    C: arithmetic::Combine<D::Accumulator>,
{
    macro_rules! of_level {
        ($kernel:ident, $by_node:ident, $accumulate:ident, $conclude:ident) => {
            Portable {
                kernel: portable::$kernel::<T, D, C>,
                by_node: portable::$by_node::<T, D, C>,
                accumulate: portable::$accumulate::<T, D, C>,
                conclude: portable::$conclude::<T, D, C>,
                accumulator: size_of::<D::Accumulator>(),
            }
        };
    }
    match simd {
        #[cfg(target_arch = "x86_64")]
        Simd::Avx512 => of_level!(avx512, avx512_by_node, avx512_accumulate, avx512_conclude),
        #[cfg(target_arch = "x86_64")]
        Simd::Avx2 => of_level!(avx2, avx2_by_node, avx2_accumulate, avx2_conclude),
        _ => of_level!(baseline, baseline_by_node, baseline_accumulate, baseline_conclude),
    }
}

#[cfg(test)]
mod tests;
