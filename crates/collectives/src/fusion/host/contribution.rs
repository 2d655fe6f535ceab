//! This rank's contribution, where it has to be computed first.

use super::{
    super::{Accumulation, Source, Validated, call::validated::Counts},
    arithmetic::{Float, combine, element, number, round, rounded, store},
    compiled::Body,
};

/// Puts the contributions of the mixtures of experts where the sum will be.
pub(super) struct Contribution;

impl Body for Contribution {
    #[inline(always)]
    unsafe fn row<T: Float>(call: &Validated, token: usize, sum: *mut u8, x: &mut [f32], _: &mut [T]) {
        let row = call.hidden * size_of::<T>();
        let Counts { experts: count, rows: last, top_k } = call.counts;
        x.fill(0.0);
        // SAFETY: `Validated` holds tensors of these shapes.
        unsafe {
            match call.source {
                Source::Tensor { .. } => unreachable!("a tensor is read as it is"),
                Source::MoeReduction { experts, scales, shared } => {
                    for expert in 0..count {
                        let at = expert * call.tokens + token;
                        add::<T>(call, x, experts.add(at * row), number(scales, at));
                    }
                    add::<T>(call, x, shared.add(token * row), 1.0);
                }
                Source::MoeFinalize { rows, index, scales, shared, routed_scaling } => {
                    for at in token * top_k..(token + 1) * top_k {
                        let scale = scales.map_or(1.0, |scales| element::<T>(scales, at));
                        match index.cast::<i32>().add(at).read_unaligned() {
                            -1 => {}
                            index if (0..last as i128).contains(&index.into()) => {
                                add::<T>(call, x, rows.add(index as usize * row), scale);
                            }
                            _ => x.fill(f32::NAN),
                        }
                    }
                    x.iter_mut().for_each(|x| *x *= routed_scaling);
                    if call.accumulation == Accumulation::Rounded {
                        round::<T>(x);
                    }
                    if let Some(shared) = shared {
                        add::<T>(call, x, shared.add(token * row), 1.0);
                    }
                }
            }
            store::<T>(x, sum);
        }
    }
}

/// Adds a row, weighted.
///
/// # Safety
/// There is a row.
#[inline(always)]
unsafe fn add<T: Float>(call: &Validated, x: &mut [f32], row: *const u8, scale: f32) {
    // SAFETY: passed on.
    unsafe {
        match call.accumulation {
            Accumulation::F32 => combine::<T>(x, row, |x, y| x + y * scale),
            Accumulation::Rounded => {
                combine::<T>(x, row, |x, y| rounded::<T>(x + rounded::<T>(y * scale)));
            }
        }
    }
}
