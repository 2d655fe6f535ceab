//! What follows the attention of a tensor-parallel transformer layer, in one call: the partial outputs of all ranks are
//! summed, the residual stream is added, the result is normed and quantised to FP8 for the next matrix product.
//!
//! Ranks as threads: `cargo run --release --example fused_all_reduce`
//! Ranks as processes: `antiphon run -n 4 -- target/release/examples/fused_all_reduce`

use antiphon::{
    collectives::fusion::Quantization,
    prelude::*,
    tensor::{
        E4M3,
        quantize::{TokenRule, fp8_tokens_inverse},
    },
};

const TOKENS: usize = 8;
const HIDDEN: usize = 1024;
const EPS: f32 = 1e-6;

fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    if std::env::var_os("RANK").is_some() {
        return rank(Communicator::from_env()?);
    }
    LocalWorld::run(4, rank).into_iter().collect()
}

fn rank(comm: Communicator) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let partial: Vec<bf16> = activations(rank as u32);
    let before: Vec<bf16> = activations(99);
    let weight: Vec<bf16> = (0..HIDDEN).map(|i| bf16::from_f32(0.5 + i as f32 / HIDDEN as f32)).collect();

    let mut stream = before.clone();
    let mut norm = vec![bf16::ZERO; TOKENS * HIDDEN];
    let (mut codes, mut scales) = (vec![0u8; TOKENS * HIDDEN], vec![0f32; TOKENS]);
    comm.all_reduce_fused(
        FusedAllReduce::of(TensorView::new(&partial, &[TOKENS, HIDDEN])?)
            .residual_in_place(&mut stream)
            .rms_norm(Some((&weight).into()), EPS)
            .norm_out(&mut norm)
            .quantize(
                Quantization::Fp8Tokens { rule: TokenRule::default() },
                &mut codes,
                Some((&mut scales).into()),
            ),
    )?;

    // The same in four steps, each through memory.
    let mut by_hand = partial;
    comm.all_reduce_in_place(&mut by_hand, ReduceOp::Sum)?;
    for (sum, residual) in by_hand.iter_mut().zip(&before) {
        *sum = bf16::from_f32(sum.to_f32() + residual.to_f32());
    }
    assert_eq!(stream, by_hand);
    for (row, norm) in by_hand.chunks(HIDDEN).zip(norm.chunks(HIDDEN)) {
        let mean = row.iter().map(|x| x.to_f32().powi(2)).sum::<f32>() / HIDDEN as f32;
        let rms = 1.0 / (mean + EPS).sqrt();
        for ((x, weight), norm) in row.iter().zip(&weight).zip(norm) {
            let expected = x.to_f32() * weight.to_f32() * rms;
            assert!((norm.to_f32() - expected).abs() <= expected.abs() / 200.0);
        }
    }
    let mut values = vec![0f32; TOKENS * HIDDEN];
    fp8_tokens_inverse(&codes, HIDDEN, &scales, &mut values)?;
    let error = |(value, norm): (&f32, &bf16)| (value - norm.to_f32()).abs();
    let worst = values.iter().zip(&norm).map(error).fold(0.0, f32::max);
    // Half the distance between the two largest codes, under the largest scale.
    assert!(worst <= scales.iter().copied().fold(0.0, f32::max) * E4M3::MAX.to_f32() / 28.0);

    println!(
        "rank {rank} of {world_size}: the first token's scale is {:.5}, FP8 is off by {worst:.3}",
        scales[0]
    );
    Ok(())
}

/// Reproducible values between −1 and 1.
fn activations(seed: u32) -> Vec<bf16> {
    let bits = |i: usize| (i as u32).wrapping_mul(2_654_435_761) ^ seed.wrapping_mul(0x9E37_79B9);
    let value = |i| (bits(i).wrapping_mul(0x85EB_CA6B) >> 8) as f32 / (1 << 23) as f32 - 1.0;
    (0..TOKENS * HIDDEN).map(|i| bf16::from_f32(value(i))).collect()
}
