//! What is special about registered memory: symmetric memory as such, and what is refused.

use std::sync::Arc;

use antiphon_collectives::{CollectiveError, Collectives, ReduceOp, cuda::Algorithm};
use antiphon_device::cuda::{DevicePointer, memory};
use antiphon_fabric::{CudaArena, RegisteredMemory};
use antiphon_tensor::{DType, Element, bf16};

use crate::harness::{At, Outcome, Rank, What, on_gpus, values};

const ONE: What = What::Registered(ReduceOp::Sum, Algorithm::OneShot);
const TWO: What = What::Registered(ReduceOp::Sum, Algorithm::TwoShot);

fn symmetric_memory(world_size: usize) {
    on_gpus(world_size, |rank| {
        let context = rank.collectives.context();
        let arena = CudaArena::new(&rank.comm, context, 8 << 20, 0)?;
        let (own, len) = (arena.pointer(rank.comm.rank()), arena.len() as u64);
        rank.collectives.register(Arc::new(arena).into())?;
        [ReduceOp::Sum, ReduceOp::Max]
            .into_iter()
            .try_for_each(|op| rank.collectives.prepare(DType::F32, op))?;
        for count in [1, 1000, 1_000_000] {
            let mine = values::<f32>(rank.comm.rank(), count);
            let mut expected = vec![0.0f32; count];
            rank.comm.all_reduce(&mine, &mut expected, ReduceOp::Sum)?;
            let (there, output) = (own.offset(4096), rank.upload(&mine)?);
            let at = |pointer: DevicePointer| At(pointer.0, DType::F32, count);
            // SAFETY: both have as many bytes and live until the stream is done.
            unsafe { memory::copy(rank.stream.borrow(), there, output.pointer(), 4 * count) }?;
            rank.meet()?;
            rank.queue(ONE, at(there), at(output.pointer()))?;
            let got = rank.download(&output, 0, 4 * count)?;
            rank.same("one-shot from an arena", &got, &expected)?;
            rank.queue(TWO, at(there), at(there))?; // in place
            rank.queue(What::AllReduce(ReduceOp::Max, None), at(there), at(output.pointer()))?;
            let got = rank.download(&output, 0, 4 * count)?;
            rank.same("two-shot in place of an arena", &got, &expected)?;
            rank.meet()?;
        }
        let beyond = At(own.offset(len - 8).0, DType::F32, 4);
        let error = rank.queue(TWO, beyond, beyond).unwrap_err().to_string();
        assert!(
            error.contains("the input must be in registered memory: no memory has the 16 bytes at 0x"),
            "{error}"
        );
        Ok(rank.collectives.unregister(&rank.comm, own)?)
    });
}

#[test]
fn symmetric_memory_is_reduced_in_place_and_out_of_it() {
    symmetric_memory(2);
}

#[test]
fn symmetric_memory_is_reduced_in_place_and_out_of_it_on_4_gpus() {
    symmetric_memory(4);
}

#[test]
fn memory_that_cannot_serve_is_refused() {
    on_gpus(2, |rank| {
        let (memory, other) = (rank.upload(&[1.0f32; 256])?, rank.upload(&[1.0f32; 256])?);
        let at = |offset: usize, count| At(memory.pointer().0 + offset as u64, DType::F32, count);
        let other_at = At(other.pointer().0, DType::F32, 256);
        let refused = |outcome: Result<(), CollectiveError>| outcome.unwrap_err().to_string();
        let text = refused(rank.queue(TWO, at(0, 256), at(0, 256)));
        assert!(text.contains("the input must be in registered memory"), "{text}");
        rank.register(&memory)?;
        let text = refused(rank.queue(TWO, at(0, 256), other_at));
        assert!(text.contains("the output must be in registered memory"), "{text}");
        let text = refused(rank.queue(ONE, at(0, 256), at(0, 256)));
        assert!(
            text.contains("the output must be apart from the input, from which peers load: 1024 bytes"),
            "{text}"
        );
        let text = refused(rank.queue(TWO, at(0, 128), at(256, 128)));
        assert!(text.contains("the output must be the input or apart from it: 512 bytes"), "{text}");
        rank.queue(ONE, at(0, 0), at(0, 0))?;
        let text = refused(rank.collectives.unregister(&rank.comm, other.pointer()));
        assert!(text.contains("no registered memory begins at"), "{text}");
        let context = rank.collectives.context();
        let long = RegisteredMemory::new(&rank.comm, context, other.pointer(), 1 << 40).unwrap_err();
        assert!(long.to_string().contains("reach beyond their allocation"), "{long}");
        let unequal = 512 + rank.comm.rank() as u64;
        let unequal = RegisteredMemory::new(&rank.comm, context, other.pointer(), unequal).unwrap_err();
        assert!(unequal.to_string().contains("rank 0 registers 512 bytes, but rank 1 513"), "{unequal}");
        let nothing = RegisteredMemory::new(&rank.comm, context, DevicePointer(4096), 16).unwrap_err();
        assert!(nothing.to_string().contains("0x1000"), "{nothing}");
        rank.compare(TWO, &[1.0f32; 256], 0)
    });
}

fn registered_sums<T: Element>(rank: &Rank, offset: usize) -> Outcome {
    for count in [1, 9, 249, 7168, 65_537, 1_500_000] {
        let mine = values::<T>(rank.comm.rank(), offset + count);
        for what in [ONE, TWO] {
            rank.compare(what, &mine, offset)?;
        }
    }
    Ok(())
}

fn registered_sums_are_the_hosts(world_size: usize) {
    on_gpus(world_size, |rank| {
        registered_sums::<f32>(rank, 0)?;
        registered_sums::<bf16>(rank, 0)?;
        registered_sums::<bf16>(rank, 3)
    });
}

#[test]
fn registered_sums_have_the_hosts_bits() {
    registered_sums_are_the_hosts(2);
}

#[test]
fn registered_sums_have_the_hosts_bits_on_3_gpus() {
    registered_sums_are_the_hosts(3);
}

#[test]
fn registered_sums_have_the_hosts_bits_on_4_gpus() {
    registered_sums_are_the_hosts(4);
}

#[test]
fn every_pattern_of_16_bits_survives_in_registered_memory() {
    on_gpus(2, |rank| {
        let bits =
            (0..=u16::MAX).map(|bits| if rank.comm.rank() == 0 { bits } else { bits.wrapping_mul(40_503) });
        let bits: Vec<bf16> = bits.map(bf16::from_bits).collect();
        rank.compare(ONE, &bits, 0)?;
        rank.compare(TWO, &bits, 0)
    });
}
