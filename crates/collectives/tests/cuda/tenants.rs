//! Another family beside the collectives, on a stream of its own.

use std::time::Duration;

use antiphon_collectives::ReduceOp;
use antiphon_device::cuda::DeviceMemory;
use antiphon_fabric::gpu::Tenant;
use antiphon_tensor::DType;
use antiphon_testing::rotation::{Rotation, rotate};

use crate::harness::{At, What, on_gpus, values};

/// One rank is late between the two calls, so both kernels of the other rank wait at once.
#[test]
fn another_tenant_works_beside_all_reduces() {
    on_gpus(2, |rank| {
        let (me, context) = (rank.comm.rank(), rank.collectives.context());
        let rotations = Tenant::new(&rank.comm, context, Tenant::LEAST_STAGING_BYTES)?;
        rotations.load_together(&rank.comm, Rotation)?;
        let beside = context.stream()?;
        for (round, count) in [8, 5000, 300_000, 3_000_000, 70_000, 12].into_iter().enumerate() {
            let of = |rank| values::<f32>(rank, count);
            let sums: Vec<f32> = of(0).iter().zip(of(1)).map(|(a, b)| a + b).collect();
            let (input, rotated) = (rank.upload(&of(me))?, rank.allocate(4 * count)?);
            let summed = rank.allocate(4 * count)?;
            let at = |memory: &DeviceMemory| At(memory.pointer().0, DType::F32, count);
            rank.collectives.prepare(DType::F32, ReduceOp::Sum)?;
            rank.comm.barrier()?;
            // SAFETY: the memory lives until the stream has been waited for.
            unsafe { rotate(&rotations, [input.pointer(), rotated.pointer()], 4 * count, beside.borrow()) }?;
            if round % 2 == me {
                std::thread::sleep(Duration::from_millis(5));
            }
            rank.queue(What::AllReduce(ReduceOp::Sum, None), at(&input), at(&summed))?;
            beside.borrow().synchronize()?;
            rotations.check()?;
            let got = rank.download(&rotated, 0, 4 * count)?;
            rank.same(&format!("{count} elements rotated"), &got, &of(1 - me))?;
            let got = rank.download(&summed, 0, 4 * count)?;
            rank.same(&format!("{count} elements summed"), &got, &sums)?;
        }
        Ok(())
    });
}
