//! What a fused call must give, to the bit: the page of `fusion` word by word, one element after the other.

use antiphon_collectives::{ReduceOp, fusion::Accumulation};
use antiphon_tensor::{
    DType, bf16, f16,
    quantize::{Fp8Groups, GroupRule, NvFp4, Source, fp8_static, fp8_tokens},
};
use antiphon_testing::UNWRITTEN;

use super::{
    case::{Case, Form, Outcome, Residual},
    data::{Data, Parts},
};
use crate::values::Values;

/// What the call of a case must write, on ranks of these nodes.
pub fn outcome(case: &Case, data: &Data, nodes: &[u32]) -> Outcome {
    match case.dtype {
        DType::F32 => of::<f32>(case, data, nodes),
        DType::F16 => of::<f16>(case, data, nodes),
        _ => of::<bf16>(case, data, nodes),
    }
}

/// The one rounding; f64 holds every f32.
fn to<T: Source>(value: f32) -> T {
    T::from_f64(f64::from(value))
}

fn of<T: Source>(case: &Case, data: &Data, nodes: &[u32]) -> Outcome {
    let sum = sum::<T>(case, data, nodes);
    let (bias, residual) = (data.bias.to_vec::<T>(), data.residual.to_vec::<T>());
    let (gamma, pre_weight) = (data.gamma.to_vec::<T>(), data.pre_weight.to_vec::<T>());
    let (mut residual_out, mut norm_out, mut inverse_rms_out) = (Vec::new(), Vec::new(), Vec::new());
    for (token, sum) in sum.chunks_exact(case.hidden).enumerate() {
        let with_bias = |i: usize| if case.bias { sum[i].widen() + bias[i].widen() } else { sum[i].widen() };
        let mut p: Vec<f32> = (0..case.hidden).map(with_bias).collect();
        if let Some(weighted) = case.pre_norm {
            let u: Vec<T> = p.iter().map(|&p| to(p)).collect();
            let weight = |i: usize| if weighted { pre_weight[i].widen() } else { 1.0 };
            p = normed(&u, weight, false, inverse_rms(&u, case.eps)).iter().map(|p| p.widen()).collect();
        }
        let with_residual = |i: usize| match case.residual {
            Residual::None => to(p[i]),
            _ => to(p[i] + residual[token * case.hidden + i].widen()),
        };
        let r: Vec<T> = (0..case.hidden).map(with_residual).collect();
        let weight = |i: usize| if case.gamma { case.weight_bias + gamma[i].widen() } else { 1.0 };
        let inverse_rms = inverse_rms(&r, case.eps);
        let rounds = case.round_before_weight && case.gamma;
        norm_out.extend(normed(&r, weight, rounds, inverse_rms));
        inverse_rms_out.push(to::<f32>(inverse_rms));
        residual_out.extend(r);
    }
    let (codes, scales) = quantized(case, &norm_out);
    let written = case.residual_out || case.residual == Residual::InPlace;
    Outcome {
        sum: case.sum_out.then(|| Values::of(&sum)),
        residual: written.then(|| Values::of(&residual_out)),
        norm: case.norm_out.then(|| Values::of(&norm_out)),
        inverse_rms: case.inverse_rms_out.then(|| Values::of(&inverse_rms_out)),
        codes: Values::of(&codes),
        scales: Values::of(&scales),
    }
}

fn sum<T: Source>(case: &Case, data: &Data, nodes: &[u32]) -> Vec<T> {
    let contributions: Vec<Vec<T>> =
        data.contributions.iter().map(|parts| contribution(case, parts)).collect();
    match case.accumulation {
        Accumulation::F32 => {
            let values: Vec<Values> = contributions.iter().map(|values| Values::of(values)).collect();
            Values::reduced(ReduceOp::Sum, &values, nodes).to_vec()
        }
        Accumulation::Rounded => {
            let add = |sum: f32, next: f32| to::<T>(sum + next).widen();
            let is_first = |&rank: &usize| !nodes[..rank].contains(&nodes[rank]);
            let of_all = |i: usize| {
                let of_node = |first: usize| {
                    let mates = (0..nodes.len()).filter(|&rank| nodes[rank] == nodes[first]);
                    mates.map(|rank| contributions[rank][i].widen()).reduce(add).unwrap()
                };
                to((0..nodes.len()).filter(is_first).map(of_node).reduce(add).unwrap())
            };
            (0..case.count()).map(of_all).collect()
        }
    }
}

fn contribution<T: Source>(case: &Case, parts: &Parts) -> Vec<T> {
    let step = |x: f32| match case.accumulation {
        Accumulation::F32 => x,
        Accumulation::Rounded => to::<T>(x).widen(),
    };
    let places = (0..case.count()).map(|at| (at, at / case.hidden, at % case.hidden));
    match parts {
        Parts::Tensor(input) => input.to_vec(),
        Parts::MoeReduction { experts, scales, shared } => {
            let (experts, shared) = (experts.to_vec::<T>(), shared.to_vec::<T>());
            let scales = scales.to_vec::<f32>();
            let element = |(at, token, _): (usize, usize, usize)| {
                let mut sum = 0.0;
                for expert in 0..scales.len() / case.tokens {
                    let output = experts[expert * case.count() + at].widen();
                    sum = step(sum + step(output * scales[expert * case.tokens + token]));
                }
                to(sum + shared[at].widen())
            };
            places.map(element).collect()
        }
        Parts::MoeFinalize { rows, index, scales, shared, routed_scaling } => {
            let (rows, scales) = (rows.to_vec::<T>(), scales.as_ref().map(Values::to_vec::<T>));
            let shared = shared.as_ref().map(Values::to_vec::<T>);
            let element = |(at, token, i): (usize, usize, usize)| {
                let (mut sum, top_k) = (0.0, index.len() / case.tokens);
                for k in token * top_k..(token + 1) * top_k {
                    let scale = scales.as_ref().map_or(1.0, |scales| scales[k].widen());
                    sum = match index[k] {
                        -1 => sum,
                        row if row >= 0 && (row as usize) < rows.len() / case.hidden => {
                            step(sum + step(rows[row as usize * case.hidden + i].widen() * scale))
                        }
                        _ => f32::NAN,
                    };
                }
                sum = step(sum * routed_scaling);
                to(shared.as_ref().map_or(sum, |shared| sum + shared[at].widen()))
            };
            places.map(element).collect()
        }
    }
}

fn inverse_rms<T: Source>(x: &[T], eps: f32) -> f32 {
    let vectors = x.chunks_exact(16 / size_of::<T>()).map(|vector| {
        let mut squares = vector[0].widen() * vector[0].widen();
        for x in &vector[1..] {
            squares += x.widen() * x.widen();
        }
        squares
    });
    let slices = by_halves(&vectors.collect::<Vec<_>>());
    let sum: f32 = by_halves(&slices).into_iter().reduce(|sum, group| sum + group).unwrap();
    1.0 / (sum * (1.0 / x.len() as f32) + eps).sqrt()
}

fn normed<T: Source>(x: &[T], weight: impl Fn(usize) -> f32, rounds_before_weight: bool, rms: f32) -> Vec<T> {
    let element = |(i, x): (usize, &T)| match rounds_before_weight {
        true => to(to::<T>(x.widen() * rms).widen() * weight(i)),
        false => to(x.widen() * weight(i) * rms),
    };
    x.iter().enumerate().map(element).collect()
}

/// The sums of 32 neighbours each: the 16 first and the 16 last ones are added, and so on with the 16 sums.
fn by_halves(numbers: &[f32]) -> Vec<f32> {
    fn sum(numbers: &[f32]) -> f32 {
        match numbers {
            [number] => *number,
            _ => {
                let (first, last) = numbers.split_at(numbers.len() / 2);
                sum(&first.iter().zip(last).map(|(a, b)| a + b).collect::<Vec<_>>())
            }
        }
    }
    let padded = |numbers: &[f32]| [numbers, &vec![0.0; 32 - numbers.len()]].concat();
    numbers.chunks(32).map(|numbers| sum(&padded(numbers))).collect()
}

/// Codes and scales, with what they are longer than they need be.
fn quantized<T: Source>(case: &Case, norm: &[T]) -> (Vec<u8>, Vec<u8>) {
    let (code_bytes, scale_bytes) = case.quantized_bytes();
    let unwritten = |bytes: usize| vec![UNWRITTEN; bytes + case.spare];
    let (mut codes, mut scales) = (unwritten(code_bytes), unwritten(scale_bytes));
    let (to_codes, to_scales) = (&mut codes[..code_bytes], &mut scales[..scale_bytes]);
    match case.form {
        None => {}
        Some(Form::Fp8 { scale, .. }) => fp8_static(norm, scale, to_codes).unwrap(),
        Some(Form::Fp8Tokens { rule }) => {
            let mut of_tokens = vec![0f32; case.tokens];
            fp8_tokens(norm, case.hidden, rule, to_codes, &mut of_tokens).unwrap();
            to_scales.copy_from_slice(Values::of(&of_tokens).bytes());
        }
        Some(Form::Fp8Groups { group }) => {
            Fp8Groups::new(case.tokens, case.hidden, group, GroupRule::FlashInfer)
                .and_then(|groups| groups.quantize_packed(norm, to_codes, to_scales))
                .unwrap();
        }
        Some(Form::NvFp4 { scale, layout, .. }) => {
            NvFp4::new(case.tokens, case.hidden, layout)
                .and_then(|format| format.quantize(norm, scale, to_codes, to_scales))
                .unwrap();
        }
    }
    (codes, scales)
}
