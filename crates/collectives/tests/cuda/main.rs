//! What only collectives on GPUs have: graphs, streams, registered memory, tenants, kernels for shapes of their own. What every
//! backend does is in `tests/conformance/`. Ranks are threads, one for each GPU; without a GPU for every rank a test says so
//! and skips.

#[macro_use]
#[path = "../by_name/mod.rs"]
mod by_name;
mod captured;
mod faults;
mod fused;
mod fusion;
mod fusion_mixed;
mod graphs;
mod harness;
mod image;
mod loud;
mod mixed;
mod mixed_graphs;
mod named;
mod nodes;
mod orders;
mod registered;
mod repeated;
mod streams;
mod tenants;

use antiphon_collectives::{Collectives, ReduceOp, StreamCollectives, cuda::Algorithm};
use antiphon_tensor::{DType, bf16};
use harness::{What, on_gpus, values};

/// The forms that take one buffer, against those of the host.
#[test]
fn forms_in_place_are_the_hosts() {
    on_gpus(2, |rank| {
        let (comm, on) = (&rank.comm, &rank.collectives);
        for count in [6, 5000, 300_000] {
            let mine = values::<f32>(comm.rank(), count);
            for form in 0..4 {
                let (mut expected, mut memory) = (mine.clone(), rank.upload(&mine)?);
                let buffer = memory.view_mut(DType::F32, &[count])?;
                // SAFETY: the memory lives until it has been downloaded.
                unsafe {
                    match form {
                        0 => {
                            comm.all_reduce_in_place(&mut expected, ReduceOp::Max)?;
                            on.all_reduce_in_place(buffer, ReduceOp::Max, &rank.stream)?;
                        }
                        1 => {
                            comm.all_gather_in_place(&mut expected)?;
                            on.all_gather_in_place(buffer, &rank.stream)?;
                        }
                        2 => {
                            comm.reduce_scatter_in_place(&mut expected, ReduceOp::Avg)?;
                            on.reduce_scatter_in_place(buffer, ReduceOp::Avg, &rank.stream)?;
                        }
                        _ => {
                            comm.all_to_all_in_place(&mut expected)?;
                            on.all_to_all_in_place(buffer, &rank.stream)?;
                        }
                    }
                }
                let got = rank.download(&memory, 0, 4 * count)?;
                rank.same(&format!("form {form} of {count}"), &got, &expected)?;
            }
        }
        let mut memory = rank.allocate(20)?;
        // SAFETY: nothing is queued.
        let refused =
            unsafe { on.all_gather_in_place(memory.view_mut(DType::F32, &[5])?, &rank.stream) }.unwrap_err();
        assert!(refused.to_string().contains("the buffer has 5 elements"), "{refused}");
        Ok(())
    });
}

#[test]
fn the_largest_messages() {
    largest(2);
}

#[test]
fn the_largest_messages_on_4_gpus() {
    largest(4);
}

fn largest(world_size: usize) {
    on_gpus(world_size, |rank| {
        let [one, two] = Algorithm::ALL;
        let all_reduces = [one, two].map(|algorithm| {
            let staged = What::AllReduce(ReduceOp::Sum, Some(algorithm));
            [staged, What::Registered(ReduceOp::Sum, algorithm)]
        });
        let mine = values::<bf16>(rank.comm.rank(), 70_000_001);
        for what in all_reduces.into_iter().flatten() {
            rank.compare(what, &mine, 0)?;
            rank.compare(what, &mine, 1)?;
        }
        let half = &mine[..50_000_000];
        for what in [What::AllGather, What::AllToAll, What::ReduceScatter(ReduceOp::Sum), What::Broadcast(1)]
        {
            rank.compare(what, half, 0)?;
        }
        Ok(())
    });
}
