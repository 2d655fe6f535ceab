//! Arguments that make no sense: refused before anything happens, with the numbers; the communicator stays usable.

use antiphon_collectives::{CollectiveError, ReduceOp, Result};
use antiphon_fabric::FabricError;
use antiphon_operation::{Call, Operation, Root};
use antiphon_tensor::{DType, Device};

use crate::{
    harness::{CollectiveBackend, Like, Loose},
    operations::{Rank, Way, calls_of, operations},
};

conformance! {
    tensors_of_different_dtypes: any_dtype, [world_1 world_2 world_3];
    outputs_of_the_wrong_length: any_dtype, [world_1 world_2 world_3];
    reductions_that_a_dtype_does_not_have: any_dtype, [world_1 world_2 world_3];
    rows_that_do_not_divide: any_dtype, [world_2 world_3];
    strided_tensors: any_dtype, [world_1 world_2 world_3];
    tensors_on_another_device: any_dtype, [world_1 world_2];
    roots_that_do_not_exist: any_dtype, [world_1 world_2 world_3];
    roots_without_their_tensor: any_dtype, [world_1 world_2 world_3];
    lists_of_counts_that_are_not_one_per_rank: any_dtype, [world_1 world_2 world_3];
    counts_that_do_not_sum_up: any_dtype, [world_1 world_2 world_3];
    counts_whose_sum_overflows: any_dtype, [world_2];
    ranks_that_do_not_exist: any_dtype, [world_1 world_2];
    a_refusal_on_one_rank_does_not_affect_the_others: any_dtype, [world_2 world_3];
}

/// A call with tensors that look like these, of whose elements none is used.
fn attempt<B: CollectiveBackend>(
    comm: &B,
    call: &Call<'_>,
    input: Option<Like>,
    output: Option<Like>,
) -> Result<()> {
    let loose = |like: Option<Like>| like.map(|like| Loose::new(comm, like));
    let (mut input, mut output) = (loose(input), loose(output));
    comm.call(call, input.as_mut().map(Loose::view), output.as_mut().map(Loose::view_mut))
}

/// Attempts a call with contiguous tensors of `input` and of `output` elements of f32.
fn of_lengths<B: CollectiveBackend>(comm: &B, call: &Call<'_>, input: usize, output: usize) -> Result<()> {
    attempt(comm, call, Some(Like::of(DType::F32, input)), Some(Like::of(DType::F32, output)))
}

/// Every operation as this rank calls it, being its root, with the elements of its input and output.
fn fitting<B: CollectiveBackend>(comm: &B) -> impl Iterator<Item = (Call<'static>, usize, usize)> {
    let (me, world, count) = (comm.rank(), comm.world_size(), 6);
    operations().map(move |operation| {
        let call = calls_of(operation, count, world)[me].clone().with_root(me);
        let (input, output) = (call.input_layout(count, me, world), call.output_layout(count, me, world));
        let lengths = (input.elements(), output.elements());
        (call, lengths.0, lengths.1)
    })
}

/// Every call is refused on every rank with such an error, and its text says all that; then ranks still work together.
fn refused<B: CollectiveBackend>(
    comm: &B,
    calls: impl IntoIterator<Item = Result<()>>,
    with: impl Fn(&CollectiveError) -> bool,
    saying: &[&str],
) {
    for (i, call) in calls.into_iter().enumerate() {
        let error = call.expect_err(&format!("call {i} was accepted"));
        let text = error.to_string();
        assert!(with(&error), "call {i}: {error:?}");
        assert!(saying.iter().all(|part| text.contains(part)), "call {i}: {text:?} does not say {saying:?}");
    }
    Rank::<B>::new(comm, DType::F32).all_reduce(3, ReduceOp::Sum, Way::Automatic);
}

fn tensors_of_different_dtypes<B: CollectiveBackend>(world: usize) {
    B::run(world, |comm| {
        let calls = fitting(&comm).map(|(call, input, output)| {
            attempt(&comm, &call, Some(Like::of(DType::F32, input)), Some(Like::of(DType::I32, output)))
        });
        let wrong = |error: &CollectiveError| {
            matches!(error, CollectiveError::DTypes { input: DType::F32, output: DType::I32, .. })
        };
        refused(&comm, calls, wrong, &["f32", "i32"]);
    });
}

fn reductions_that_a_dtype_does_not_have<B: CollectiveBackend>(world: usize) {
    B::run(world, |comm| {
        let reductions = || fitting(&comm).filter(|(call, ..)| call.operation.row().reduces);
        for op in [ReduceOp::Band, ReduceOp::Bor, ReduceOp::Bxor] {
            let calls = reductions().map(|(call, from, to)| of_lengths(&comm, &call.with_op(op), from, to));
            let wrong =
                |error: &CollectiveError| matches!(error, CollectiveError::NotBits { dtype: DType::F32, .. });
            refused(&comm, calls, wrong, &["combines the bits of integers, and not of f32"]);
        }
        // What is only moved.
        let truths = |count| Some(Like::of(DType::Bool, count));
        let calls = reductions().map(|(call, from, to)| attempt(&comm, &call, truths(from), truths(to)));
        let wrong =
            |error: &CollectiveError| matches!(error, CollectiveError::NotNumeric { dtype: DType::Bool, .. });
        refused(&comm, calls, wrong, &["bool cannot be reduced"]);
    });
}

fn outputs_of_the_wrong_length<B: CollectiveBackend>(world: usize) {
    B::run(world, |comm| {
        let call = |operation| Call::new(operation).with_root(comm.rank());
        let alike = [Operation::AllReduce, Operation::Reduce, Operation::Broadcast];
        let calls = alike.map(|operation| of_lengths(&comm, &call(operation), 7, 6));
        let wrong =
            |error: &CollectiveError| matches!(error, CollectiveError::Count { actual: 6, expected: 7, .. });
        refused(&comm, calls, wrong, &["output", "6", "7"]);

        let (block, row) = (2, 2 * world + 1);
        let gathered = [Operation::AllGather, Operation::Gather];
        let divided = [Operation::ReduceScatter, Operation::Scatter];
        let calls = gathered.map(|operation| of_lengths(&comm, &call(operation), block, row));
        let calls = calls.into_iter().chain(divided.map(|op| of_lengths(&comm, &call(op), row, block)));
        let wrong = |error: &CollectiveError| {
            matches!(error, CollectiveError::Count { actual, expected, .. }
                if (*actual, *expected) == (2 * world + 1, 2 * world))
        };
        let rule = format!("{world} ranks × 2 elements");
        refused(&comm, calls, wrong, &[&(2 * world + 1).to_string(), &(2 * world).to_string(), &rule]);
    });
}

fn rows_that_do_not_divide<B: CollectiveBackend>(world: usize) {
    B::run(world, |comm| {
        let count = 4 * world + 1;
        let in_place = |operation| {
            let mut row = Loose::new(&comm, Like::of(DType::F32, count));
            comm.call_in_place(&Call::new(operation), row.view_mut())
        };
        let calls = [
            in_place(Operation::AllGather),
            in_place(Operation::ReduceScatter),
            of_lengths(&comm, &Call::all_to_all(), count, count),
            in_place(Operation::AllToAll),
        ];
        let wrong = |error: &CollectiveError| matches!(error, CollectiveError::Count { actual, .. } if *actual == count);
        let rule = format!("a multiple of the world size {world}");
        refused(&comm, calls, wrong, &[&count.to_string(), &rule]);
    });
}

fn strided_tensors<B: CollectiveBackend>(world: usize) {
    B::run(world, |comm| {
        let like = |count, stride| Some(Like { dtype: DType::F32, count, stride });
        // Where parts are uneven, a rank may have fewer than two elements, which are contiguous.
        let calls = fitting(&comm).filter(|(_, input, _)| *input > 1);
        let calls = calls.map(|(call, from, to)| attempt(&comm, &call, like(from, 3), like(to, 1)));
        let wrong = |error: &CollectiveError| matches!(error, CollectiveError::Tensor { which: "input", .. });
        refused(&comm, calls, wrong, &["input", "[3]", "not contiguous"]);

        let calls = fitting(&comm).filter(|(_, _, output)| *output > 1);
        let calls = calls.map(|(call, from, to)| attempt(&comm, &call, like(from, 1), like(to, 3)));
        let wrong =
            |error: &CollectiveError| matches!(error, CollectiveError::Tensor { which: "output", .. });
        refused(&comm, calls, wrong, &["output", "[3]", "not contiguous"]);

        let in_place =
            operations().filter(|operation| !matches!(operation, Operation::Gather | Operation::Scatter));
        let in_place =
            in_place.filter(|operation| operation.row().in_place != antiphon_operation::InPlace::Never);
        let calls = in_place.map(|operation| {
            let mut row = Loose::new(&comm, like(2 * world, 3).unwrap());
            comm.call_in_place(&Call::new(operation), row.view_mut())
        });
        refused(&comm, calls, wrong, &["output", "[3]", "not contiguous"]);
    });
}

fn tensors_on_another_device<B: CollectiveBackend>(world: usize) {
    B::run(world, |comm| {
        // No backend of these tests serves that one.
        let elsewhere = if comm.device() == Device::Host { Device::Cuda(77) } else { Device::Host };
        let calls = fitting(&comm).map(|(call, input, output)| {
            let mut input = Loose::new(&comm, Like::of(DType::F32, input)).on(elsewhere);
            let mut output = Loose::new(&comm, Like::of(DType::F32, output));
            comm.call(&call, Some(input.view()), Some(output.view_mut()))
        });
        let wrong = |error: &CollectiveError| matches!(error, CollectiveError::Device { device, .. } if *device == elsewhere);
        let (there, here) = (elsewhere.to_string(), format!("these collectives serve {}", comm.device()));
        refused(&comm, calls, wrong, &["input", &there, &here]);
    });
}

fn roots_that_do_not_exist<B: CollectiveBackend>(world: usize) {
    B::run(world, |comm| {
        let root = world + 41;
        let rooted = || fitting(&comm).filter(|(call, ..)| call.operation.row().root.is_some());
        let calls = rooted().map(|(call, from, to)| of_lengths(&comm, &call.with_root(root), from, to));
        let wrong = |error: &CollectiveError| {
            matches!(error, CollectiveError::Fabric(FabricError::InvalidArgument(_)))
        };
        let says = [format!("root rank {root}"), format!("world size {world}")];
        refused(&comm, calls, wrong, &[&says[0], &says[1]]);
        let calls = [Operation::Broadcast, Operation::Reduce].map(|operation| {
            let mut buffer = Loose::new(&comm, Like::of(DType::F32, 6));
            comm.call_in_place(&Call::new(operation).with_root(root), buffer.view_mut())
        });
        refused(&comm, calls, wrong, &[&says[0], &says[1]]);
    });
}

fn roots_without_their_tensor<B: CollectiveBackend>(world: usize) {
    B::run(world, |comm| {
        let me = comm.rank();
        let lacks = |lacking: &'static str| move |error: &CollectiveError| matches!(error, CollectiveError::Missing { which, rank, .. } if (*which, *rank) == (lacking, me));
        let of =
            |role: Root| fitting(&comm).filter(move |(call, ..)| call.operation.row().root == Some(role));
        let like = |count| Some(Like::of(DType::F32, count));
        // The root of a broadcast may have its tensor in the output.
        let gives = of(Root::Gives).filter(|(call, ..)| call.operation != Operation::Broadcast);
        let calls = gives.map(|(call, _, output)| attempt(&comm, &call, None, like(output)));
        refused(&comm, calls, lacks("input"), &[&format!("rank {me} must pass an input")]);
        let calls = of(Root::Gets).map(|(call, input, _)| attempt(&comm, &call, like(input), None));
        refused(&comm, calls, lacks("output"), &[&format!("rank {me} must pass an output")]);
    });
}

fn lists_of_counts_that_are_not_one_per_rank<B: CollectiveBackend>(world: usize) {
    B::run(world, |comm| {
        let good = vec![1; world];
        for wrong_len in [world - 1, world + 1] {
            let bad = vec![1; wrong_len];
            let call = |operation, sends: &[usize], receives: &[usize]| {
                let call = Call::new(operation).with_counts(sends.to_vec()).with_receives(receives.to_vec());
                of_lengths(&comm, &call, world, world)
            };
            let calls = [
                call(Operation::AllToAllV, &bad, &good),
                call(Operation::AllToAllV, &good, &bad),
                call(Operation::AllGatherV, &bad, &good),
                call(Operation::ReduceScatterV, &bad, &good),
            ];
            let wrong = |error: &CollectiveError| {
                matches!(error, CollectiveError::Counts { actual, world_size, .. }
                    if (*actual, *world_size) == (wrong_len, world))
            };
            refused(&comm, calls, wrong, &[&wrong_len.to_string(), &format!("{world} ranks")]);
        }
    });
}

fn counts_that_do_not_sum_up<B: CollectiveBackend>(world: usize) {
    B::run(world, |comm| {
        let (threes, fours) = (vec![3; world], vec![4; world]);
        let call = |sends: &[usize], receives: &[usize]| {
            let call = Call::all_to_all_v(sends, receives);
            of_lengths(&comm, &call, 3 * world, 3 * world)
        };
        let calls = [call(&fours, &threes), call(&threes, &fours)];
        let wrong = |error: &CollectiveError| {
            matches!(error, CollectiveError::Count { actual, expected, .. }
                if (*actual, *expected) == (3 * world, 4 * world))
        };
        refused(&comm, calls, wrong, &[&(3 * world).to_string(), &(4 * world).to_string()]);
    });
}

/// The counts are right modulo 2⁶⁴.
fn counts_whose_sum_overflows<B: CollectiveBackend>(world: usize) {
    B::run(world, |comm| {
        let counts = [usize::MAX, 1 + 4];
        let call = Call::all_to_all_v(&counts, &counts);
        let wrong = |error: &CollectiveError| matches!(error, CollectiveError::Count { .. });
        refused(&comm, [of_lengths(&comm, &call, 4, 4)], wrong, &["all_to_all_v"]);
    });
}

fn ranks_that_do_not_exist<B: CollectiveBackend>(world: usize) {
    B::run(world, |comm| {
        let call = |to, from| {
            let [mut input, mut output] = [(); 2].map(|()| Loose::new(&comm, Like::of(DType::F32, 4)));
            comm.send_recv(input.view(), to, output.view_mut(), from)
        };
        let wrong = |error: &CollectiveError| {
            matches!(error, CollectiveError::Fabric(FabricError::InvalidArgument(_)))
        };
        refused(&comm, [call(world, 0)], wrong, &[&format!("destination rank {world}")]);
        refused(&comm, [call(0, world + 5)], wrong, &[&format!("source rank {}", world + 5)]);
    });
}

fn a_refusal_on_one_rank_does_not_affect_the_others<B: CollectiveBackend>(world: usize) {
    B::run(world, |comm| {
        if comm.rank() == 1 {
            of_lengths(&comm, &Call::new(Operation::AllReduce), 7, 6).unwrap_err();
            of_lengths(&comm, &Call::broadcast(world), 1, 1).unwrap_err();
        }
        let rank = Rank::<B>::new(&comm, DType::F32);
        rank.all_reduce(7, ReduceOp::Sum, Way::Automatic);
        rank.call(&Call::new(Operation::Broadcast), 1);
    });
}
