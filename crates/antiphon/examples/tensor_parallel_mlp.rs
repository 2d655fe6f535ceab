//! A transformer's MLP, sharded over ranks as Megatron-LM does it (Shoeybi et al., 2019): `y = gelu(x A) B`.
//!
//! The columns of A and the rows of B are divided among the ranks. Each rank computes its share of the hidden layer
//! without asking anybody, and a partial result of full size; one all-reduce adds these up.
//!
//! Ranks as threads: `cargo run --release --example tensor_parallel_mlp`
//! Ranks as processes: `antiphon run -n 4 -- target/release/examples/tensor_parallel_mlp`

use antiphon::prelude::*;

const TOKENS: usize = 8;
const MODEL: usize = 64;
const HIDDEN: usize = 256;

fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    if std::env::var_os("RANK").is_some() {
        return rank(Communicator::from_env()?);
    }
    LocalWorld::run(4, rank).into_iter().collect()
}

fn rank(comm: Communicator) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let mapping = Mapping::builder(comm.world_size(), comm.rank()).tp(comm.world_size()).build()?;
    let (tp_rank, tp_size) = (mapping.tp_rank(), mapping.tp_size());
    // Every rank makes the same weights; a real model would load only its shard.
    let (x, a, b) = (matrix(TOKENS, MODEL, 1), matrix(MODEL, HIDDEN, 2), matrix(HIDDEN, MODEL, 3));

    // Columns of A and rows of B: any split will do, even an uneven one.
    let columns = HIDDEN * tp_rank / tp_size..HIDDEN * (tp_rank + 1) / tp_size;
    let a_shard = Matrix { rows: MODEL, columns: columns.len(), data: a.columns(columns.clone()) };
    let b_shard = Matrix {
        rows: columns.len(),
        columns: MODEL,
        data: b.data[columns.start * MODEL..columns.end * MODEL].to_vec(),
    };
    let mut y = x.times(&a_shard).gelu().times(&b_shard);
    comm.all_reduce_in_place(&mut y.data, ReduceOp::Sum)?;

    let whole = x.times(&a).gelu().times(&b);
    let worst = y.data.iter().zip(&whole.data).map(|(s, w)| (s - w).abs()).fold(0.0, f32::max);
    // Only the order of the additions differs: at most HIDDEN roundings of values around 1.
    assert!(worst < HIDDEN as f32 * f32::EPSILON, "the sharded MLP is off by {worst}");
    println!("rank {tp_rank} of {tp_size}: hidden units {columns:?}, off by at most {worst:.1e}");
    Ok(())
}

struct Matrix {
    rows: usize,
    columns: usize,
    data: Vec<f32>,
}

impl Matrix {
    fn times(&self, other: &Matrix) -> Matrix {
        let mut data = vec![0.0; self.rows * other.columns];
        for row in 0..self.rows {
            for k in 0..self.columns {
                for column in 0..other.columns {
                    data[row * other.columns + column] +=
                        self.data[row * self.columns + k] * other.data[k * other.columns + column];
                }
            }
        }
        Matrix { rows: self.rows, columns: other.columns, data }
    }

    fn columns(&self, range: std::ops::Range<usize>) -> Vec<f32> {
        self.data.chunks(self.columns).flat_map(|row| row[range.clone()].iter().copied()).collect()
    }

    /// The approximation by tanh, as in GPT-2.
    fn gelu(mut self) -> Matrix {
        for x in &mut self.data {
            *x *= 0.5 * (1.0 + (0.797_884_6 * (*x + 0.044_715 * x.powi(3))).tanh());
        }
        self
    }
}

/// Reproducible values between −0.2 and 0.2.
fn matrix(rows: usize, columns: usize, seed: u32) -> Matrix {
    let value =
        |i: usize| (((i as u32).wrapping_mul(2_654_435_761) ^ seed.wrapping_mul(40_503)) >> 16) as f32;
    Matrix { rows, columns, data: (0..rows * columns).map(|i| (value(i) / 65_536.0 - 0.5) * 0.4).collect() }
}
