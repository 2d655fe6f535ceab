//! A layer of experts, of which each token chooses two, spread over the ranks.
//!
//! Ranks as threads: `cargo run --release --example expert_parallel`
//! Ranks as processes: `antiphon run -n 4 -- target/release/examples/expert_parallel`

use antiphon::{
    moe::{Choices, Combine, Dispatch, Moe, MoeConfig, MoeError, Routing, RowFormat, Tokens, layout},
    prelude::*,
};

const TOKENS: usize = 100;
const HIDDEN: usize = 64;
const TOP_K: usize = 2;
const LOCAL: usize = 2; // experts of a rank

fn main() -> Result<(), MoeError> {
    if std::env::var_os("RANK").is_some() {
        return rank(Communicator::from_env()?);
    }
    LocalWorld::run(4, rank).into_iter().collect()
}

/// What an expert makes of a value.
fn expert(number: usize, value: f32) -> f32 {
    value * (number + 1) as f32
}

fn rank(comm: Communicator) -> Result<(), MoeError> {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let experts = LOCAL * world_size;
    let x: Vec<f32> = (0..TOKENS * HIDDEN).map(|i| (rank + i % 7) as f32).collect();
    // A router's choices: two experts for each token, a quarter and three quarters of the weight.
    let ids: Vec<i64> =
        (0..TOKENS).flat_map(|t| [t % experts, (t + 3) % experts]).map(|id| id as i64).collect();
    let weights: Vec<f32> = [0.25, 0.75].repeat(TOKENS);

    let mut moe = Moe::new(&comm, MoeConfig::default())?;
    let chosen = TensorView::new(&ids, &[TOKENS, TOP_K])?;
    let layout = layout(&chosen, experts, world_size)?;
    let format = RowFormat { hidden: HIDDEN, dtype: DType::F32, scales: None };
    let handle = moe.notify(&comm, &Routing::of(&layout, format))?;

    // To the ranks of their experts.
    let rows = handle.rows();
    let (mut to_x, mut to_ids, mut to_weights) =
        (vec![0f32; rows * HIDDEN], vec![0i64; rows * TOP_K], vec![0f32; rows * TOP_K]);
    let tokens = Tokens {
        x: TensorView::new(&x, &[TOKENS, HIDDEN])?,
        scales: None,
        choices: Some(Choices { ids: chosen, weights: TensorView::new(&weights, &[TOKENS, TOP_K])? }),
    };
    let received = Tokens {
        x: TensorViewMut::new(&mut to_x, &[rows, HIDDEN])?,
        scales: None,
        choices: Some(Choices {
            ids: TensorViewMut::new(&mut to_ids, &[rows, TOP_K])?,
            weights: TensorViewMut::new(&mut to_weights, &[rows, TOP_K])?,
        }),
    };
    moe.dispatch(&comm, &handle, Dispatch { tokens, received })?;

    // What this rank's experts make of each row, summed over those that its token chose.
    let choices = to_ids.chunks(TOP_K).zip(to_weights.chunks(TOP_K));
    for (row, (ids, weights)) in to_x.chunks_mut(HIDDEN).zip(choices) {
        let here = || ids.iter().zip(weights).filter(|(id, _)| **id >= 0);
        for value in row {
            *value = here().map(|(&id, weight)| weight * expert(rank * LOCAL + id as usize, *value)).sum();
        }
    }

    // And back.
    let mut y = vec![0f32; TOKENS * HIDDEN];
    let output = TensorViewMut::new(&mut y, &[TOKENS, HIDDEN])?;
    moe.combine(&comm, &handle, Combine::of(TensorView::new(&to_x, &[rows, HIDDEN])?, output))?;

    for (i, &sum) in y.iter().enumerate() {
        let [first, second] = [0, 1].map(|k| ids[i / HIDDEN * TOP_K + k] as usize);
        assert_eq!(sum, 0.25 * expert(first, x[i]) + 0.75 * expert(second, x[i]));
    }
    println!("rank {rank} of {world_size}: {TOKENS} tokens out, {rows} rows in, y[9] = {}", y[9]);
    moe.close(&comm)
}
