//! The operations on a row of the sum.

use std::slice::from_raw_parts_mut;

use antiphon_tensor::quantize::{fp8_static, fp8_tokens};

use super::{
    super::{Quantization, Scale, Validated},
    arithmetic::{Float, combine, number, rms, round, scale, store},
    compiled::Body,
};

/// The steps that make every output from the sum. A later output may lie in the sum's memory.
pub(super) struct Epilogue;

impl Body for Epilogue {
    #[inline(always)]
    unsafe fn row<T: Float>(call: &Validated, token: usize, sum: *mut u8, x: &mut [f32], norm_row: &mut [T]) {
        let wants_norm = call.norm_out.is_some() || call.inverse_rms_out.is_some() || call.codes.is_some();
        if call.residual_out.is_none() && !wants_norm {
            return;
        }
        let place = token * call.hidden * size_of::<T>();
        // SAFETY: `Validated` holds tensors of these shapes.
        unsafe {
            combine::<T>(x, sum, |_, sum| sum);
            if let Some(bias) = call.bias {
                combine::<T>(x, bias, |x, bias| x + bias);
            }
            if let Some(norm) = call.pre_norm {
                round::<T>(x);
                // −0 changes nothing when it is added, 0 would change −0.
                scale::<T>(x, norm.weight, -0.0, false, rms::<T>(x, norm.eps));
                round::<T>(x);
            }
            if let Some(residual) = call.residual {
                combine::<T>(x, residual.add(place), |x, residual| x + residual);
            }
            round::<T>(x);
            if let Some(residual_out) = call.residual_out {
                store::<T>(x, residual_out.add(place));
            }
            let Some(norm) = call.norm.filter(|_| wants_norm) else { return };
            let inverse_rms = rms::<T>(x, norm.eps);
            if let Some(inverse_rms_out) = call.inverse_rms_out {
                inverse_rms_out.cast::<f32>().add(token).write_unaligned(f32::narrow(inverse_rms));
            }
            scale::<T>(x, norm.weight, call.weight_bias, call.round_before_weight, inverse_rms);
            if let Some(norm_out) = call.norm_out {
                store::<T>(x, norm_out.add(place));
            }
            if let (Some(form), Some(codes)) = (call.quantization, call.codes) {
                store::<T>(x, norm_row.as_mut_ptr().cast());
                quantize(call, form, codes, token, norm_row);
            }
        }
    }

    /// Padding among the scales is 0.
    unsafe fn begin(call: &Validated) {
        let size = match call.quantization {
            Some(Quantization::Fp8Groups { group }) => call.groups(group).packed_scales().size(),
            Some(Quantization::NvFp4 { layout, .. }) => call.blocks(layout).scale_grid().size(),
            _ => return,
        };
        let scales = call.scales.expect("a form with scales was checked to have them");
        // SAFETY: `Validated` checked that `scales` has `size` bytes.
        unsafe { scales.write_bytes(0, size) };
    }
}

/// # Safety
/// `Validated` holds codes and scales of this form.
#[inline(always)]
unsafe fn quantize<T: Float>(
    call: &Validated,
    form: Quantization<*mut u8>,
    codes: *mut u8,
    token: usize,
    norm: &[T],
) {
    let hidden = call.hidden;
    let scales = || call.scales.expect("a form with scales was checked to have them");
    // SAFETY: the caller's; nothing else refers to them meanwhile.
    let codes = |bytes: usize| unsafe { from_raw_parts_mut(codes.add(token * bytes), bytes) };
    // SAFETY: as for the codes.
    let all_scales = |bytes: usize| unsafe { from_raw_parts_mut(scales(), bytes) };
    let quantized = match form {
        // SAFETY: a scale is there.
        Quantization::Fp8 { scale } => fp8_static(norm, unsafe { value(scale) }, codes(hidden)),
        Quantization::Fp8Tokens { rule } => {
            let mut scale = [0.0];
            let quantized = fp8_tokens(norm, hidden, rule, codes(hidden), &mut scale);
            // SAFETY: there is one for each token, at any alignment.
            unsafe { scales().cast::<f32>().add(token).write_unaligned(scale[0]) };
            quantized
        }
        Quantization::Fp8Groups { group } => {
            let groups = call.groups(group);
            let scales = all_scales(groups.packed_scales().size());
            groups.quantize_packed_token(token, norm, codes(hidden), scales)
        }
        Quantization::NvFp4 { scale, layout } => {
            let blocks = call.blocks(layout);
            let scales = all_scales(blocks.scale_grid().size());
            // SAFETY: a scale is there.
            blocks.quantize_row(token, norm, unsafe { value(scale) }, codes(hidden / 2), scales)
        }
    };
    quantized.expect("all lengths were checked");
}

/// # Safety
/// The scale is at its address, if it has one.
unsafe fn value(scale: Scale<*mut u8>) -> f32 {
    match scale {
        Scale::Value(value) => value,
        // SAFETY: passed on.
        Scale::Tensor(at) => unsafe { number(at, 0) },
    }
}
