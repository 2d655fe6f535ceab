//! Arguments that make no sense: refused before anything happens, with the numbers; the communicator stays usable.

use antiphon_collectives::{
    CollectiveError, Collectives, Communicator, ReduceOp, Result,
    all_reduce::{Algorithm, AllReduceOptions},
};
use antiphon_fabric::FabricError;
use antiphon_operation::{Call, Operation};
use antiphon_tensor::{DType, Device, TensorView, TensorViewMut};

use crate::{
    harness::Backend,
    operations::{Rank, Way},
};

conformance! {
    tensors_of_different_dtypes: any_dtype, [world_1 world_3];
    outputs_of_the_wrong_length: any_dtype, [world_1 world_3];
    reductions_that_a_dtype_does_not_have: any_dtype, [world_1 world_3];
    rows_that_do_not_divide: any_dtype, [world_2 world_3];
    strided_tensors: any_dtype, [world_1 world_3];
    tensors_on_another_device: any_dtype, [world_1 world_2];
    roots_that_do_not_exist: any_dtype, [world_1 world_3];
    roots_without_their_tensor: any_dtype, [world_1 world_3];
    lists_of_counts_that_are_not_one_per_rank: any_dtype, [world_1 world_3];
    counts_that_do_not_sum_up: any_dtype, [world_1 world_3];
    registered_memory_of_gpus: any_dtype, [world_1 world_2];
    a_refusal_on_one_rank_does_not_affect_the_others: any_dtype, [world_2 world_3];
}

const SUM: ReduceOp = ReduceOp::Sum;

/// Every call is refused on every rank with such an error, and its text says all that; then ranks still work together.
fn refused<const N: usize>(
    comm: &Communicator,
    calls: [Result<()>; N],
    with: impl Fn(&CollectiveError) -> bool,
    saying: &[&str],
) {
    for (i, call) in calls.into_iter().enumerate() {
        let error = call.expect_err(&format!("call {i} was accepted"));
        let text = error.to_string();
        assert!(with(&error), "call {i}: {error:?}");
        assert!(saying.iter().all(|part| text.contains(part)), "call {i}: {text:?} does not say {saying:?}");
    }
    let mut total = [1i32];
    comm.all_reduce_in_place(&mut total, SUM).unwrap();
    assert_eq!(total, [comm.world_size() as i32]);
}

fn registered_memory_of_gpus<B: Backend>(world: usize) {
    B::run(world, |comm| {
        let options = AllReduceOptions::registered(Algorithm::TwoShot);
        let calls = [comm.all_reduce_with(&[1.0f32], &mut [0.0f32], SUM, options)];
        let wrong = |error: &CollectiveError| matches!(error, CollectiveError::Refused { .. });
        refused(&comm, calls, wrong, &["all_reduce: the registration must be left out", "of GPUs"]);
    });
}

fn tensors_of_different_dtypes<B: Backend>(world: usize) {
    B::run(world, |comm| {
        let (input, mut output, root) = (vec![0f32; world], vec![0i32; world], comm.rank());
        let calls = [
            comm.all_reduce(&input, &mut output, SUM),
            comm.all_gather(&input[..1], &mut output),
            comm.reduce_scatter(&input, &mut output[..1], SUM),
            comm.all_to_all(&input, &mut output),
            comm.all_to_all_v(&input, &vec![1; world], &mut output, &vec![1; world]),
            comm.broadcast_from(Some((&input).into()), &mut output, root),
            comm.reduce(&input, Some((&mut output).into()), SUM, root),
            comm.gather(&input[..1], Some((&mut output).into()), root),
            comm.scatter(Some((&input).into()), &mut output[..1], root),
        ];
        let wrong = |error: &CollectiveError| {
            matches!(error, CollectiveError::DTypes { input: DType::F32, output: DType::I32, .. })
        };
        refused(&comm, calls, wrong, &["f32", "i32"]);
    });
}

fn reductions_that_a_dtype_does_not_have<B: Backend>(world: usize) {
    B::run(world, |comm| {
        let (input, mut output, root) = (vec![0f32; world], vec![0f32; world], comm.rank());
        let calls = [
            comm.all_reduce(&input, &mut output, ReduceOp::Band),
            comm.reduce_scatter(&input, &mut output[..1], ReduceOp::Bor),
            comm.reduce(&input, Some((&mut output).into()), ReduceOp::Bxor, root),
        ];
        let wrong =
            |error: &CollectiveError| matches!(error, CollectiveError::NotBits { dtype: DType::F32, .. });
        refused(&comm, calls, wrong, &["combines the bits of integers, and not of f32"]);
        // What is only moved.
        let mut truths = [1u8; 4];
        // SAFETY: four bytes that live until the call is over.
        let stored = unsafe {
            TensorViewMut::from_raw_parts(truths.as_mut_ptr(), DType::Bool, &[4], None, Device::Host)
        };
        let wrong =
            |error: &CollectiveError| matches!(error, CollectiveError::NotNumeric { dtype: DType::Bool, .. });
        refused(&comm, [comm.all_reduce_in_place(stored.unwrap(), SUM)], wrong, &["bool cannot be reduced"]);
    });
}

fn outputs_of_the_wrong_length<B: Backend>(world: usize) {
    B::run(world, |comm| {
        let (input, mut output, root) = ([0f32; 7], [0f32; 6], comm.rank());
        let calls = [
            comm.all_reduce(&input, &mut output, SUM),
            comm.reduce(&input, Some((&mut output).into()), SUM, root),
            comm.broadcast_from(Some((&input).into()), &mut output, root),
        ];
        let wrong =
            |error: &CollectiveError| matches!(error, CollectiveError::Count { actual: 6, expected: 7, .. });
        refused(&comm, calls, wrong, &["output", "6", "7"]);

        let (block, row, mut out, mut row_out) =
            ([0f32; 2], vec![0f32; 2 * world + 1], [0f32; 2], vec![0f32; 2 * world + 1]);
        let calls = [
            comm.all_gather(&block, &mut row_out),
            comm.reduce_scatter(&row, &mut out, SUM),
            comm.gather(&block, Some((&mut row_out).into()), root),
            comm.scatter(Some((&row).into()), &mut out, root),
        ];
        let wrong = |error: &CollectiveError| {
            matches!(error, CollectiveError::Count { actual, expected, .. }
                if (*actual, *expected) == (2 * world + 1, 2 * world))
        };
        let rule = format!("{world} ranks × 2 elements");
        refused(&comm, calls, wrong, &[&(2 * world + 1).to_string(), &(2 * world).to_string(), &rule]);
    });
}

fn rows_that_do_not_divide<B: Backend>(world: usize) {
    B::run(world, |comm| {
        let (row, mut out) = (vec![0u8; 4 * world + 1], vec![0u8; 4 * world + 1]);
        let calls = [
            comm.all_gather_in_place(&mut out),
            comm.reduce_scatter_in_place(&mut out, SUM),
            comm.all_to_all(&row, &mut out),
            comm.all_to_all_in_place(&mut out),
        ];
        let wrong = |error: &CollectiveError| matches!(error, CollectiveError::Count { actual, .. } if *actual == 4 * world + 1);
        let rule = format!("a multiple of the world size {world}");
        refused(&comm, calls, wrong, &[&(4 * world + 1).to_string(), &rule]);
    });
}

fn strided_tensors<B: Backend>(world: usize) {
    B::run(world, |comm| {
        let (data, root) = (vec![0f32; 2 * world], comm.rank());
        let (mut space, mut out, mut one) = (data.clone(), data.clone(), [0f32; 2]);
        let matrix = || TensorView::new(&data, &[world, 2]).unwrap();
        let column = || matrix().transpose(0, 1).unwrap().select(0, 0).unwrap();
        // In a world of one a column has one element, and is contiguous.
        let strided =
            || if world == 1 { TensorView::with_strides(&data, &[2], &[0]).unwrap() } else { column() };
        let calls = [
            comm.all_reduce(strided(), &mut out[..strided().numel()], SUM),
            comm.all_gather(strided(), &mut out),
            comm.reduce_scatter(strided(), &mut one, SUM),
            comm.all_to_all(strided(), &mut out),
            comm.all_to_all_v(strided(), &vec![1; world], &mut out, &vec![1; world]),
            comm.broadcast_from(Some(strided()), &mut out, root),
            comm.reduce(strided(), Some((&mut out).into()), SUM, root),
            comm.gather(strided(), Some((&mut out).into()), root),
            comm.scatter(Some(strided()), &mut one, root),
        ];
        let wrong = |error: &CollectiveError| matches!(error, CollectiveError::Tensor { which: "input", .. });
        let strides = format!("{:?}", strided().strides());
        refused(&comm, calls, wrong, &["input", &strides, "not contiguous"]);

        if world > 1 {
            let calls = [
                comm.all_reduce(&data[..world], every_second(&mut space), SUM),
                comm.all_reduce_in_place(every_second(&mut space), SUM),
                comm.all_gather_in_place(every_second(&mut space)),
                comm.broadcast(every_second(&mut space), root),
                comm.gather(&data[..1], Some(every_second(&mut space)), root),
            ];
            let wrong =
                |error: &CollectiveError| matches!(error, CollectiveError::Tensor { which: "output", .. });
            refused(&comm, calls, wrong, &["output", "[2]", "not contiguous"]);
        }
    });
}

fn every_second(space: &mut [f32]) -> TensorViewMut<'_> {
    let count = space.len() / 2;
    TensorViewMut::with_strides(space, &[count], &[2]).unwrap()
}

fn tensors_on_another_device<B: Backend>(world: usize) {
    B::run(world, |comm| {
        let (data, mut out) = ([0f32; 4], [0f32; 4]);
        // No backend of these tests serves that one.
        let elsewhere = Device::Cuda(77);
        // SAFETY: the memory is refused for where it is said to be, and never touched.
        let there = || unsafe {
            TensorView::from_raw_parts(data.as_ptr().cast(), DType::F32, &[4], None, elsewhere).unwrap()
        };
        let calls = [
            comm.all_reduce(there(), &mut out, SUM),
            comm.broadcast_from(Some(there()), &mut out, comm.rank()),
        ];
        let wrong = |error: &CollectiveError| matches!(error, CollectiveError::Device { device, .. } if *device == elsewhere);
        refused(&comm, calls, wrong, &["input", "cuda:77"]);
    });
}

fn roots_that_do_not_exist<B: Backend>(world: usize) {
    B::run(world, |comm| {
        let (input, mut output, root) = (vec![0f32; world], vec![0f32; world], world + 41);
        let calls = [
            comm.broadcast(&mut output, root),
            comm.broadcast_from(Some((&input).into()), &mut output, root),
            comm.reduce(&input, Some((&mut output).into()), SUM, root),
            comm.reduce_in_place(&mut output, SUM, root),
            comm.gather(&input[..1], Some((&mut output).into()), root),
            comm.scatter(Some((&input).into()), &mut output[..1], root),
        ];
        let wrong = |error: &CollectiveError| {
            matches!(error, CollectiveError::Fabric(FabricError::InvalidArgument(_)))
        };
        refused(&comm, calls, wrong, &[&format!("root rank {root}"), &format!("world size {world}")]);
    });
}

fn roots_without_their_tensor<B: Backend>(world: usize) {
    B::run(world, |comm| {
        let (input, mut output, root) = ([0f32; 2], [0f32; 2], comm.rank());
        let calls = [comm.broadcast_from(None, &mut output, root), comm.scatter(None, &mut output, root)];
        let wrong = |error: &CollectiveError| matches!(error, CollectiveError::Missing { which: "input", rank, .. } if *rank == root);
        refused(&comm, calls, wrong, &[&format!("rank {root} must pass an input")]);

        let calls = [comm.reduce(&input, None, SUM, root), comm.gather(&input, None, root)];
        let wrong = |error: &CollectiveError| matches!(error, CollectiveError::Missing { which: "output", rank, .. } if *rank == root);
        refused(&comm, calls, wrong, &[&format!("rank {root} must pass an output")]);
    });
}

fn lists_of_counts_that_are_not_one_per_rank<B: Backend>(world: usize) {
    B::run(world, |comm| {
        let (input, mut output) = (vec![0f32; world], vec![0f32; world]);
        let (good, short, long) = (vec![1; world], vec![1; world - 1], vec![1; world + 1]);
        for (sends, receives, wrong_len) in [
            (&short, &good, world - 1),
            (&long, &good, world + 1),
            (&good, &short, world - 1),
            (&good, &long, world + 1),
        ] {
            let call = [comm.all_to_all_v(&input, sends, &mut output, receives)];
            let wrong = |error: &CollectiveError| {
                matches!(error, CollectiveError::Counts { actual, world_size, .. }
                    if (*actual, *world_size) == (wrong_len, world))
            };
            refused(&comm, call, wrong, &[&wrong_len.to_string(), &format!("{world} ranks")]);
        }
    });
}

fn counts_that_do_not_sum_up<B: Backend>(world: usize) {
    B::run(world, |comm| {
        let (tensor, mut out) = (vec![0f32; 3 * world], vec![0f32; 3 * world]);
        let (threes, fours) = (vec![3; world], vec![4; world]);
        let numbers = [(3 * world).to_string(), (4 * world).to_string()];
        let calls = [
            comm.all_to_all_v(&tensor, &fours, &mut out, &threes),
            comm.all_to_all_v(&tensor, &threes, &mut out, &fours),
        ];
        let wrong = |error: &CollectiveError| {
            matches!(error, CollectiveError::Count { actual, expected, .. }
                if (*actual, *expected) == (3 * world, 4 * world))
        };
        refused(&comm, calls, wrong, &[&numbers[0], &numbers[1]]);
    });
}

fn a_refusal_on_one_rank_does_not_affect_the_others<B: Backend>(world: usize) {
    B::run(world, |comm| {
        if comm.rank() == 1 {
            comm.all_reduce(&[0f32; 7], &mut [0f32; 6], SUM).unwrap_err();
            comm.broadcast(&mut [0f32], world).unwrap_err();
        }
        let rank = Rank::<B>::new(&comm, DType::F32);
        rank.all_reduce(7, SUM, Way::Automatic);
        rank.call(&Call::new(Operation::Broadcast), 1);
    });
}
