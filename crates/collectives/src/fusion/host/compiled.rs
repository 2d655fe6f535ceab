//! Loops over rows, compiled for every dtype and every level of vector instructions.

use std::ops::Range;

use antiphon_device::host::cpu::Simd;
use antiphon_tensor::{DType, bf16, f16};

use super::{super::Validated, arithmetic::Float};

/// The operations on each row.
pub(super) trait Body {
    /// One token: its row of the sum is at `sum`; `x` and `elements` have room for a row each.
    ///
    /// # Safety
    /// The call's tensors are there, and `sum` is valid for a row; the token is one of the call's.
    unsafe fn row<T: Float>(call: &Validated, token: usize, sum: *mut u8, x: &mut [f32], elements: &mut [T]);

    /// The preparation before the first token.
    ///
    /// # Safety
    /// As [`row`](Self::row).
    unsafe fn begin(_call: &Validated) {}
}

type Rows = unsafe fn(&Validated, Range<usize>, *mut u8, &mut [f32]);

/// A body for all rows, for this dtype and this machine.
#[derive(Clone, Copy)]
pub(super) struct Loop(Rows);

impl Loop {
    pub(super) fn of<B: Body>(dtype: DType) -> Self {
        Self(match dtype {
            DType::F32 => select::<B, f32>(),
            DType::F16 => select::<B, f16>(),
            DType::BF16 => select::<B, bf16>(),
            other => unreachable!("{other} was refused"),
        })
    }

    /// For these tokens; `sum` is the whole sum, `rows` has room for two rows of f32.
    ///
    /// # Safety
    /// As [`Body::row`], of every token.
    pub(super) unsafe fn run(self, call: &Validated, tokens: Range<usize>, sum: *mut u8, rows: &mut [f32]) {
        // SAFETY: passed on; `select` took what this machine has.
        unsafe { (self.0)(call, tokens, sum, rows) }
    }
}

fn select<B: Body, T: Float>() -> Rows {
    match Simd::widest() {
        #[cfg(target_arch = "x86_64")]
        Simd::Avx512 => avx512::<B, T>,
        #[cfg(target_arch = "x86_64")]
        Simd::Avx2 => avx2::<B, T>,
        _ => baseline::<B, T>,
    }
}

#[inline(always)]
unsafe fn rows<B: Body, T: Float>(call: &Validated, tokens: Range<usize>, sum: *mut u8, rows: &mut [f32]) {
    let (x, elements) = rows.split_at_mut(call.hidden);
    // SAFETY: f32 is at least as large as T and as aligned, and any bits are a T.
    let elements = unsafe { std::slice::from_raw_parts_mut(elements.as_mut_ptr().cast::<T>(), call.hidden) };
    // SAFETY: passed on to the caller.
    unsafe {
        if tokens.start == 0 && !tokens.is_empty() {
            B::begin(call);
        }
        for token in tokens {
            B::row::<T>(call, token, sum.add(token * call.hidden * size_of::<T>()), x, elements);
        }
    }
}

macro_rules! compiled_for {
    ($(#[$attribute:meta])* $name:ident) => {
        /// # Safety
        /// As [`Loop::run`], on a machine with the instructions of the function's name.
        $(#[$attribute])*
        unsafe fn $name<B: Body, T: Float>(
            call: &Validated,
            tokens: Range<usize>,
            sum: *mut u8,
            scratch: &mut [f32],
        ) {
            // SAFETY: passed on to the caller.
            unsafe { rows::<B, T>(call, tokens, sum, scratch) }
        }
    };
}

compiled_for!(baseline);
compiled_for!(
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,f16c")]
    avx2
);
compiled_for!(
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
    avx512
);
