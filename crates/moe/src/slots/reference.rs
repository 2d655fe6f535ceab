//! Dispatch to slots, and combine from them, as they are defined, with the data of all ranks in one place.

use antiphon_tensor::E4M3;

/// A token of all ranks: its rank, and its number there.
pub type Source = (usize, usize);

/// The slots of an expert: the tokens that chose it, in order. `ids` is `[T, K]` of each rank.
pub fn slots(ids: &[Vec<i64>], top_k: usize, expert: usize) -> Vec<Source> {
    let chose = |choices: &[i64]| choices.contains(&(expert as i64));
    let of_rank = |(rank, ids): (usize, &Vec<i64>)| {
        let tokens = ids.chunks(top_k).enumerate().filter(|(_, choices)| chose(choices));
        tokens.map(move |(token, _)| (rank, token)).collect::<Vec<_>>()
    };
    ids.iter().enumerate().flat_map(of_rank).collect()
}

/// The E4M3 code nearest to a value, of two the even one; beyond ±448 these; 0x7F for a NaN.
fn nearest(value: f32) -> u8 {
    if value.is_nan() {
        return 0x7F;
    }
    let distance = |code: u8| (f64::from(E4M3::from_bits(code).to_f32()) - f64::from(value.abs())).abs();
    let magnitude = match value.abs() {
        large if large >= 448.0 => 0x7E,
        _ => (0..=0x7E)
            .min_by(|&a, &b| distance(a).total_cmp(&distance(b)).then((a % 2).cmp(&(b % 2))))
            .expect("there are codes"),
    };
    magnitude | u8::from(value.is_sign_negative()) << 7
}

/// The codes of 128 elements of a row, and their scale.
pub fn quantise(x: &[f32], powers_of_two: bool) -> (Vec<u8>, f32) {
    let largest = x.iter().filter(|x| !x.is_nan()).fold(1e-4f32, |most, x| most.max(x.abs()));
    let scale = largest * (1.0 / 448.0);
    if !powers_of_two {
        return (x.iter().map(|x| nearest(x * (448.0 / largest))).collect(), scale);
    }
    let power = if scale.is_finite() { f64::from(scale).log2().ceil().exp2() } else { f64::INFINITY };
    (x.iter().map(|&x| nearest((f64::from(x) / power) as f32)).collect(), power as f32)
}

/// The sum of a token: of its choices, those of an expert each with the expert's row, in their order.
pub fn combine(choices: &[(f32, Option<Vec<f32>>)], hidden: usize) -> Vec<f32> {
    let mut sum = vec![0f32; hidden];
    for (weight, row) in choices {
        let Some(row) = row else { continue };
        for (sum, x) in sum.iter_mut().zip(row) {
            let product = weight * x;
            *sum += product;
        }
    }
    sum
}

/// The value of code 1 of a LogFMT block and the difference of the logarithms of neighbouring codes, as `logfmt` defines them; none for a
/// block that stays as it is.
pub fn logfmt(block: &[f32]) -> Option<(f64, f64)> {
    let magnitudes: Vec<f64> = block.iter().map(|&x| f64::from(x.abs())).collect();
    let largest = magnitudes.iter().copied().fold(0.0, f64::max);
    let smallest = magnitudes.iter().copied().fold(f64::INFINITY, f64::min);
    let is_number = block.iter().all(|x| x.is_finite());
    if !is_number || largest >= 1.0 || largest < 2f64.powi(-93) || smallest == largest {
        return None;
    }
    let least = smallest.max(largest * 2f64.powi(-32));
    Some((least, (largest / least).log2() / 510.0))
}
