//! Ranks that make different calls: every rank soon gets an error with both calls, and no rank hangs.
//!
//! In each case the last rank makes one call and the others another.

use std::time::{Duration, Instant};

use antiphon_collectives::{
    CollectiveError, ReduceOp, Result,
    all_reduce::{Algorithm, AllReduceOptions},
};
use antiphon_fabric::FabricError;
use antiphon_operation::{Call, Operation};
use antiphon_tensor::DType;

use crate::{
    harness::{CollectiveBackend, Like, Loose},
    operations::{Rank, Way, calls_of, operations},
};

conformance! {
    about_the_count: any_dtype, [world_2 world_3 world_5];
    about_the_dtype: any_dtype, [world_2 world_3 world_5];
    about_the_operator: any_dtype, [world_2 world_3 world_5];
    about_the_root: any_dtype, [world_2 world_3 world_5];
    about_the_algorithm: any_dtype, [world_2 world_3 world_5];
    about_the_operation: any_dtype, [world_2 world_3 world_5];
    about_the_order: any_dtype, [world_2 world_3 world_5];
    about_a_barrier: any_dtype, [world_2 world_3 world_5];
}

/// A call with how its signature reads.
pub type Named<'c, B> = (&'c (dyn Fn(&B) -> Result<()> + Sync), &'c str);

/// The last rank makes one call, the others another.
pub fn disagree<B: CollectiveBackend>(world: usize, others: Named<'_, B>, last: Named<'_, B>) {
    let errors = B::run(world, |comm| {
        // The table of algorithms is loaded by the first all-reduce, kernels too; see `in_the_very_first_call`.
        Rank::<B>::new(&comm, DType::F32).all_reduce(1, ReduceOp::Sum, Way::Automatic);
        comm.meet(); // see `a_call_that_all_agreed_on_is_not_aborted_by_the_next`
        let (start, (call, text)) = (Instant::now(), if comm.rank() == world - 1 { last } else { others });
        let error = match call(&comm).and_then(|()| comm.told()) {
            Err(CollectiveError::Fabric(error)) => error,
            other => panic!("rank {} of {world} in {text}: {other:?}", comm.rank()),
        };
        assert!(start.elapsed() < Duration::from_secs(5), "took {:?}", start.elapsed());
        every_operation_fails(&comm, &error);
        let message = error.to_string();
        match error {
            FabricError::Mismatch { .. } => {
                let texts = [others.1, last.1];
                assert!(texts.iter().all(|text| message.contains(text)), "{message} does not say {texts:?}");
                (true, message)
            }
            // Another rank noticed it first.
            FabricError::Aborted { .. } => {
                assert!(message.contains(text), "{message} does not say {text}");
                (false, message)
            }
            _ => panic!("rank {} of {world}: {error:?}", comm.rank()),
        }
    });
    assert!(errors.iter().any(|(saw_both, _)| *saw_both), "nobody saw both: {errors:?}");
}

/// The communicator answers with the first error from then on.
pub fn every_operation_fails<B: CollectiveBackend>(comm: &B, first: &FabricError) {
    for operation in operations().chain([Operation::Barrier]) {
        match plain(comm, operation, DType::F32, 2) {
            Err(CollectiveError::Fabric(FabricError::Failed(cause))) => {
                assert_eq!(cause.to_string(), first.to_string(), "{operation}");
            }
            other => panic!("{operation} after {first}: {other:?}"),
        }
    }
}

/// Calls an operation on blocks of `count` elements.
pub fn plain<B: CollectiveBackend>(comm: &B, operation: Operation, dtype: DType, count: usize) -> Result<()> {
    let call = match operation {
        Operation::Barrier => Call::new(operation),
        _ => calls_of(operation, count, comm.world_size()).swap_remove(comm.rank()),
    };
    make(comm, &call, dtype, count)
}

/// A call with tensors of the lengths that it asks for.
pub fn make<B: CollectiveBackend>(comm: &B, call: &Call<'_>, dtype: DType, count: usize) -> Result<()> {
    let (me, world) = (comm.rank(), comm.world_size());
    if call.operation == Operation::Barrier {
        return comm.call(call, None, None);
    }
    let lengths = [call.input_layout(count, me, world), call.output_layout(count, me, world)];
    let [mut input, mut output] = lengths.map(|layout| Loose::new(comm, Like::of(dtype, layout.elements())));
    comm.call(call, Some(input.view()), Some(output.view_mut()))
}

fn about_the_count<B: CollectiveBackend>(world: usize) {
    use Operation::{AllGather, AllReduce, Broadcast};
    let f32s = |operation, count| move |comm: &B| plain(comm, operation, DType::F32, count);
    disagree::<B>(
        world,
        (&f32s(AllReduce, 7), "all_reduce(7 × f32, sum"),
        (&f32s(AllReduce, 8), "all_reduce(8 × f32, sum"),
    );
    // One travels in the packet's head, the other beside it.
    disagree::<B>(
        world,
        (&f32s(AllGather, 10), "all_gather(10 × f32)"),
        (&f32s(AllGather, 11), "all_gather(11 × f32)"),
    );
    // Many pieces against few.
    disagree::<B>(
        world,
        (&f32s(Broadcast, 1 << 20), "broadcast(1048576 × f32"),
        (&f32s(Broadcast, 1), "broadcast(1 × f32"),
    );
    // One rank takes one algorithm, and the other rank the other one.
    disagree::<B>(
        world,
        (&f32s(AllReduce, 1 << 20), "all_reduce(1048576 × f32, sum"),
        (&f32s(AllReduce, 1), "all_reduce(1 × f32, sum"),
    );
}

fn about_the_dtype<B: CollectiveBackend>(world: usize) {
    let nine = |operation, dtype| move |comm: &B| plain(comm, operation, dtype, 9);
    disagree::<B>(
        world,
        (&nine(Operation::AllReduce, DType::F16), "all_reduce(9 × f16, sum"),
        (&nine(Operation::AllReduce, DType::BF16), "all_reduce(9 × bf16, sum"),
    );
    disagree::<B>(
        world,
        (&nine(Operation::AllGather, DType::F64), "all_gather(9 × f64)"),
        (&nine(Operation::AllGather, DType::I8), "all_gather(9 × i8)"),
    );
}

fn about_the_operator<B: CollectiveBackend>(world: usize) {
    let by = |operation, op| move |comm: &B| make(comm, &Call::new(operation).with_op(op), DType::F32, 6);
    disagree::<B>(
        world,
        (&by(Operation::AllReduce, ReduceOp::Sum), "all_reduce(6 × f32, sum"),
        (&by(Operation::AllReduce, ReduceOp::Avg), "all_reduce(6 × f32, avg"),
    );
    disagree::<B>(
        world,
        (&by(Operation::ReduceScatter, ReduceOp::Min), "reduce_scatter(6 × f32, min"),
        (&by(Operation::ReduceScatter, ReduceOp::Prod), "reduce_scatter(6 × f32, prod"),
    );
}

fn about_the_root<B: CollectiveBackend>(world: usize) {
    for (operation, text) in
        [(Operation::Broadcast, "broadcast(5 × f32, "), (Operation::Reduce, "reduce(5 × f32, sum, ")]
    {
        let to = |root| move |comm: &B| make(comm, &Call::new(operation).with_root(root), DType::F32, 5);
        let texts = [0, 1].map(|root| format!("{text}root {root}"));
        disagree::<B>(world, (&to(0), &texts[0]), (&to(1), &texts[1]));
    }
}

fn about_the_algorithm<B: CollectiveBackend>(world: usize) {
    let by = |algorithm: Algorithm| {
        move |comm: &B| {
            let [mut input, mut output] = [(); 2].map(|()| Loose::new(comm, Like::of(DType::F32, 100)));
            let options = AllReduceOptions::from(algorithm);
            comm.all_reduce_with(input.view(), output.view_mut(), ReduceOp::Sum, options)
        }
    };
    disagree::<B>(world, (&by(Algorithm::OneShot), "one-shot"), (&by(Algorithm::TwoShot), "two-shot"));
}

fn about_the_operation<B: CollectiveBackend>(world: usize) {
    use Operation::{AllReduce, AllToAll, Broadcast, ReduceScatter};
    let f32s = |operation, count| move |comm: &B| plain(comm, operation, DType::F32, count);
    disagree::<B>(
        world,
        (&f32s(AllReduce, 5), "all_reduce(5 × f32, sum"),
        (&f32s(Broadcast, 5), "broadcast(5 × f32, root 0"),
    );
    disagree::<B>(
        world,
        (&f32s(AllToAll, 4), "all_to_all(4 × f32)"),
        (&f32s(ReduceScatter, 4), "reduce_scatter(4 × f32, sum"),
    );
}

fn about_the_order<B: CollectiveBackend>(world: usize) {
    let both = |first, second| {
        move |comm: &B| {
            plain(comm, first, DType::U8, 5)?;
            plain(comm, second, DType::U8, 5)
        }
    };
    disagree::<B>(
        world,
        (&both(Operation::Broadcast, Operation::AllGather), "broadcast(5 × u8, root 0"),
        (&both(Operation::AllGather, Operation::Broadcast), "all_gather(5 × u8)"),
    );
}

fn about_a_barrier<B: CollectiveBackend>(world: usize) {
    let barrier = |comm: &B| plain(comm, Operation::Barrier, DType::F32, 0);
    let reduce = |comm: &B| plain(comm, Operation::AllReduce, DType::F32, 9);
    disagree::<B>(world, (&barrier, "barrier"), (&reduce, "all_reduce(9 × f32, sum"));
    disagree::<B>(world, (&reduce, "all_reduce(9 × f32, sum"), (&barrier, "barrier"));
}
