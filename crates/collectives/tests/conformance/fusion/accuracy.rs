//! What a fused call gives against the f64 reference, which knows nothing of the library's arithmetic.

use antiphon_collectives::{
    fusion::reference::{self, Contribution, Norm, amax, is_code_of},
    reference::Expected,
};
use antiphon_tensor::{
    E2M1, E4M3, Element, UE8M0,
    quantize::{Fp8Groups, GroupRule, NvFp4, TokenRule},
    with_dtype,
};

use super::{
    case::{Case, Form, Outcome, Residual},
    data::{Data, Parts},
};
use crate::values::Values;

/// Panics unless everything that was written is within what the reference allows.
pub fn check(case: &Case, data: &Data, nodes: &[u32], outcome: &Outcome) {
    let expected = call(case, data, nodes).outputs();
    let outputs = [
        ("sum_out", &outcome.sum, &expected.sum),
        ("residual_out", &outcome.residual, &expected.residual),
        ("norm_out", &outcome.norm, &expected.norm),
        ("inverse_rms_out", &outcome.inverse_rms, &expected.inverse_rms),
    ];
    for (which, values, expected) in outputs {
        let Some(values) = values else { continue };
        for (i, (actual, expected)) in numbers(values).into_iter().zip(expected).enumerate() {
            assert!(expected.accepts(actual), "{case:?}: {which}[{i}] {actual:e}: {expected:?}");
        }
    }
    if let Some(form) = case.form {
        check_quantized(case, form, &expected.norm, outcome.codes.bytes(), outcome.scales.bytes());
    }
}

fn numbers(values: &Values) -> Vec<f64> {
    with_dtype!(values.dtype(), T => values.to_vec::<T>().into_iter().map(<T as Element>::to_f64).collect())
}

fn call(case: &Case, data: &Data, nodes: &[u32]) -> reference::Call {
    let weight_bias = f64::from(case.weight_bias);
    let norm = |weight: Option<&Values>, weight_bias, round_before_weight| Norm {
        weight: weight.map(numbers),
        weight_bias,
        round_before_weight,
        eps: f64::from(case.eps),
    };
    reference::Call {
        dtype: case.dtype,
        tokens: case.tokens,
        hidden: case.hidden,
        accumulation: case.accumulation,
        contributions: data.contributions.iter().map(contribution).collect(),
        nodes: nodes.to_vec(),
        bias: case.bias.then(|| numbers(&data.bias)),
        pre_norm: case.pre_norm.map(|weighted| norm(weighted.then_some(&data.pre_weight), 0.0, false)),
        residual: (case.residual != Residual::None).then(|| numbers(&data.residual)),
        norm: case
            .has_norm()
            .then(|| norm(case.gamma.then_some(&data.gamma), weight_bias, case.round_before_weight)),
    }
}

fn contribution(parts: &Parts) -> Contribution {
    match parts {
        Parts::Tensor(input) => Contribution::Tensor(numbers(input)),
        Parts::MoeReduction { experts, scales, shared } => Contribution::MoeReduction {
            experts: numbers(experts),
            scales: numbers(scales),
            shared: numbers(shared),
        },
        Parts::MoeFinalize { rows, index, scales, shared, routed_scaling } => Contribution::MoeFinalize {
            rows: numbers(rows),
            index: index.clone(),
            scales: scales.as_ref().map(numbers),
            shared: shared.as_ref().map(numbers),
            routed_scaling: f64::from(*routed_scaling),
        },
    }
}

/// Each scale follows from an amax within the bounds, and each code from a norm within the bounds and the scale that was written.
fn check_quantized(case: &Case, form: Form, norm: &[Expected], codes: &[u8], scales: &[u8]) {
    let e4m3 = |x: f32| E4M3::from_f32(x).to_f32();
    let code = |i: usize| E4M3::from_bits(codes[i]).to_f32();
    let group = match form {
        Form::Fp8 { .. } | Form::Fp8Tokens { .. } => case.hidden,
        Form::Fp8Groups { group } => group,
        Form::NvFp4 { .. } => NvFp4::BLOCK,
    };
    for (index, block) in norm.chunks_exact(group).enumerate() {
        if block.iter().any(|x| !x.exact.is_finite()) {
            continue; // `definition` has those
        }
        let (amax, per_row) = (amax(block), case.hidden / group);
        let (token, column) = (index / per_row, index % per_row);
        let require = |right: bool, what: &str, i: usize| {
            assert!(right, "{case:?}: {what} of element {i} of block {index} of {group}");
        };
        let right_codes = |divisor: f64| {
            for (i, x) in block.iter().enumerate() {
                require(is_code_of(x, divisor, e4m3, code(index * group + i)), "code", i);
            }
        };
        match form {
            Form::Fp8 { scale, .. } => right_codes(f64::from(scale)),
            Form::Fp8Tokens { rule } => {
                let divisor = match rule {
                    TokenRule::Quotient => 448.0,
                    TokenRule::Reciprocal => 1.0 / f64::from(1.0_f32 / 448.0),
                };
                let scale = f32::from_ne_bytes(scales[token * 4..][..4].try_into().unwrap());
                let nearest = |scale: f32| scale.max(1.0 / 512.0 / 448.0);
                require(is_code_of(&amax, divisor, nearest, scale), "scale", 0);
                right_codes(f64::from(scale));
            }
            Form::Fp8Groups { .. } => {
                let groups = Fp8Groups::new(case.tokens, case.hidden, group, GroupRule::FlashInfer).unwrap();
                let at = groups.packed_scales().offset(token, column).unwrap();
                let scale = UE8M0::from_bits(scales[at]).to_f32();
                let nearest = |scale: f32| UE8M0::from_f32_up(scale.max(1e-10)).to_f32();
                require(is_code_of(&amax, 448.0, nearest, scale), "scale", 0);
                right_codes(f64::from(scale));
            }
            Form::NvFp4 { scale: of_all, layout, .. } => {
                let grid = NvFp4::new(case.tokens, case.hidden, layout).unwrap().scale_grid();
                let scale = E4M3::from_bits(scales[grid.offset(token, column).unwrap()]).to_f32();
                require(is_code_of(&amax, 6.0 / f64::from(of_all), e4m3, scale), "scale", 0);
                for (i, x) in block.iter().enumerate() {
                    let pair = E2M1::unpack(codes[(index * group + i) / 2]);
                    let code = if i % 2 == 0 { pair.0 } else { pair.1 }.to_f32();
                    let divisor = f64::from(scale) / f64::from(of_all);
                    let right = match divisor == 0.0 {
                        true => code == 0.0,
                        false => is_code_of(x, divisor, |x| E2M1::from_f32(x).to_f32(), code),
                    };
                    require(right, "code", i);
                }
            }
        }
    }
}
