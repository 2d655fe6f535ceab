//! What is done with a row of the sum.

use std::slice::from_raw_parts_mut;

use antiphon_tensor::quantize::{fp8_static, fp8_tokens};

use super::{
    super::{
        Checked,
        checked::{CheckedQuantization, CheckedScale},
    },
    arithmetic::{Float, combine, number, rms, round, scale, store},
    compiled::Body,
};

/// From the sum to everything that is made of it. The sum's memory may be that of a later output.
pub(super) struct Epilogue;

impl Body for Epilogue {
    #[inline(always)]
    unsafe fn row<T: Float>(call: &Checked, token: usize, sum: *mut u8, x: &mut [f32], norm_row: &mut [T]) {
        if call.residual_out.is_null() && call.norm_out.is_null() && call.codes.is_null() {
            return;
        }
        let place = token * call.hidden * size_of::<T>();
        // SAFETY: `Checked` holds tensors of these shapes.
        unsafe {
            combine::<T>(x, sum, |_, sum| sum);
            if !call.bias.is_null() {
                combine::<T>(x, call.bias, |x, bias| x + bias);
            }
            if let Some(norm) = call.pre_norm {
                round::<T>(x);
                // −0 changes nothing when it is added, 0 would change −0.
                scale::<T>(x, norm.weight, -0.0, rms::<T>(x, norm.eps));
                round::<T>(x);
            }
            if !call.residual.is_null() {
                combine::<T>(x, call.residual.add(place), |x, residual| x + residual);
            }
            round::<T>(x);
            if !call.residual_out.is_null() {
                store::<T>(x, call.residual_out.add(place));
            }
            let Some(norm) = call.norm.filter(|_| !call.norm_out.is_null() || !call.codes.is_null()) else {
                return;
            };
            scale::<T>(x, norm.weight, call.weight_bias, rms::<T>(x, norm.eps));
            if !call.norm_out.is_null() {
                store::<T>(x, call.norm_out.add(place));
            }
            if let Some(form) = call.quantization {
                store::<T>(x, norm_row.as_mut_ptr().cast());
                quantize(call, form, token, norm_row);
            }
        }
    }

    /// Padding among the scales is 0.
    unsafe fn begin(call: &Checked) {
        let size = match call.quantization {
            Some(CheckedQuantization::Fp8Groups { groups, .. }) => groups.packed_scales().size(),
            Some(CheckedQuantization::NvFp4 { format, .. }) => format.scale_grid().size(),
            _ => return,
        };
        // SAFETY: `Checked` holds so many bytes.
        unsafe { call.scales.write_bytes(0, size) };
    }
}

/// # Safety
/// `Checked` holds codes and scales of this form.
#[inline(always)]
unsafe fn quantize<T: Float>(call: &Checked, form: CheckedQuantization, token: usize, norm: &[T]) {
    let hidden = call.hidden;
    // SAFETY: the caller's; nothing else refers to them meanwhile.
    let codes = |bytes: usize| unsafe { from_raw_parts_mut(call.codes.add(token * bytes), bytes) };
    // SAFETY: as for the codes.
    let scales = |bytes: usize| unsafe { from_raw_parts_mut(call.scales, bytes) };
    let quantized = match form {
        // SAFETY: a scale is there.
        CheckedQuantization::Fp8 { scale } => fp8_static(norm, unsafe { value(scale) }, codes(hidden)),
        CheckedQuantization::Fp8Tokens { rule } => {
            let mut scale = [0.0];
            let quantized = fp8_tokens(norm, hidden, rule, codes(hidden), &mut scale);
            // SAFETY: there is one for each token, at any alignment.
            unsafe { call.scales.cast::<f32>().add(token).write_unaligned(scale[0]) };
            quantized
        }
        CheckedQuantization::Fp8Groups { groups, .. } => {
            let scales = scales(groups.packed_scales().size());
            groups.quantize_packed_token(token, norm, codes(hidden), scales)
        }
        CheckedQuantization::NvFp4 { format, scale, .. } => {
            let scales = scales(format.scale_grid().size());
            // SAFETY: a scale is there.
            format.quantize_row(token, norm, unsafe { value(scale) }, codes(hidden / 2), scales)
        }
    };
    quantized.expect("all lengths were checked");
}

/// # Safety
/// The scale is at its address, if it has one.
unsafe fn value(scale: CheckedScale) -> f32 {
    // SAFETY: passed on.
    if scale.at.is_null() { scale.value } else { unsafe { number(scale.at, 0) } }
}
