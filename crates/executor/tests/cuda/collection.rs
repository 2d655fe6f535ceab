//! Which plan of a collection does a call.

use antiphon_collectives::cuda::{CudaBuilder, CudaCollectives};
use antiphon_device::cuda::DeviceMemory;
use antiphon_executor::{
    ExecutorError,
    cuda::{AlgorithmCollection, Choice, CudaOptions},
};
use antiphon_language::library::{Setting, find};
use antiphon_plan::{ReduceOp, verify::VerifiedPlan};
use antiphon_tensor::{DType, Device, Element, TensorView, TensorViewMut};

use crate::harness::{Outcome, Rank, on_gpus, proved, values};

fn plan(name: &str, ranks: u32, op: ReduceOp, most: u64) -> VerifiedPlan {
    let mut setting = Setting { op, ..Setting::new(ranks) };
    setting.options.max_message_size = most;
    proved(find(name).unwrap().plan(&setting).unwrap())
}

/// A rank and its collectives.
type Peer<'a> = (&'a Rank, &'a CudaCollectives);

fn collectives(rank: &Rank) -> Outcome<CudaCollectives> {
    let builder = CudaCollectives::builder(&rank.comm, &rank.context);
    Ok(builder.staging_bytes(CudaBuilder::LEAST_STAGING_BYTES).build()?)
}

/// The `len` elements that a call gives for an input.
fn call<T: Element + Default>(
    (rank, collectives): Peer<'_>,
    plans: &AlgorithmCollection,
    collective: &str,
    mine: &[T],
    len: usize,
) -> Outcome<Vec<T>> {
    let [input, output] =
        [mine.len(), len].map(|count| DeviceMemory::allocate(&rank.context, count * size_of::<T>()));
    let (input, output) = (input?, output?);
    input.write(&rank.stream, 0, TensorView::from(mine).as_bytes()?)?;
    rank.meet()?;
    let at = |memory: &DeviceMemory| memory.pointer().0 as usize as *mut u8;
    let device = Device::Cuda(rank.context.device().ordinal());
    // SAFETY: the memory lives until `read` has waited for the stream.
    unsafe {
        let input = TensorView::from_raw_parts(at(&input), T::DTYPE, &[mine.len()], None, device)?;
        let output = TensorViewMut::from_raw_parts(at(&output), T::DTYPE, &[len], None, device)?;
        plans.execute(collectives, collective, input, output, &rank.stream)?;
    }
    let mut got = vec![T::default(); len];
    output.read(&rank.stream, 0, TensorViewMut::from(&mut got[..]).as_mut_bytes()?)?;
    plans.check()?;
    collectives.check()?;
    Ok(got)
}

/// What a call on a rank's number and 10 more has as its first and its last element.
fn called(peer: Peer<'_>, plans: &AlgorithmCollection, collective: &str, count: usize) -> Outcome<[f32; 2]> {
    let mine = vec![peer.0.comm.rank() as f32 + 10.0; count];
    let got = call(peer, plans, collective, &mine, count)?;
    Ok([got[0], got[count - 1]])
}

fn the_first_that_serves(world_size: usize) {
    let ranks = world_size as u32;
    // They differ in what they compute, so that results tell which was executed.
    let small = plan("packet-all-reduce", ranks, ReduceOp::Max, 4096);
    let large = plan("two-shot-all-reduce", ranks, ReduceOp::Sum, u64::MAX);
    let same = plan("one-shot-all-reduce", ranks, ReduceOp::Min, u64::MAX);
    let gather = plan("ring-all-gather", ranks, ReduceOp::Sum, u64::MAX);
    on_gpus(world_size, |rank| {
        let (comm, context) = (&rank.comm, &rank.context);
        let ours = &collectives(rank)?;
        let peer = (rank, ours);
        let mut plans = AlgorithmCollection::new(comm);
        let none = plans.prepare(comm, ours, "allreduce", DType::F32, 64).unwrap_err();
        assert!(matches!(&none, ExecutorError::NoPlan { known, .. } if known == "there are none"), "{none}");
        for (plan, dtypes) in
            [(&gather, &[][..]), (&small, &[]), (&large, &[DType::F32]), (&same, &[DType::F32])]
        {
            plans.add(comm, context, plan, dtypes, CudaOptions::default())?;
        }
        let [few, many] = [64 * world_size, 1024 * world_size];
        let unprepared = called(peer, &plans, "allreduce", few).unwrap_err();
        assert!(unprepared.to_string().contains("\"packet-all-reduce\" was not prepared"), "{unprepared}");
        for count in [few, many] {
            plans.prepare(comm, ours, "allreduce", DType::F32, 4 * count)?;
        }
        let (greatest, sum) = ((world_size + 9) as f32, (world_size * (world_size + 19) / 2) as f32);
        assert_eq!(called(peer, &plans, "allreduce", few)?, [greatest; 2]);
        assert_eq!(called(peer, &plans, "allreduce", many)?, [sum; 2]);

        let explained = plans.explain("allreduce", DType::F32, 4 * many);
        let why_not: Vec<_> =
            explained.iter().map(|each| each.why_not.as_deref().unwrap_or("chosen")).collect();
        assert_eq!(why_not[0], "it does allgather");
        assert!(why_not[1].contains("4096"), "{why_not:?}");
        assert_eq!(why_not[2..], ["chosen", "\"two-shot-all-reduce\" was added before it"]);
        let none = plans.prepare(comm, ours, "allreduce", DType::BF16, 4 * many).unwrap_err();
        let ExecutorError::NoPlan { known, world_size: all, .. } = &none else { panic!("{none:?}") };
        assert_eq!(*all, world_size);
        assert!(known.contains("\"two-shot-all-reduce\": it was added for f32"), "{known}");
        let none = called(peer, &plans, "broadcast", few).unwrap_err();
        assert!(none.to_string().contains("no plan serves broadcast"), "{none}");
        Ok(())
    });
}

#[test]
fn the_first_that_serves_a_call_does_it_on_2() {
    the_first_that_serves(2);
}

#[test]
fn the_first_that_serves_a_call_does_it_on_3() {
    the_first_that_serves(3);
}

#[test]
fn the_first_that_serves_a_call_does_it_on_4() {
    the_first_that_serves(4);
}

#[test]
fn the_first_that_serves_a_call_does_it_on_8() {
    the_first_that_serves(8);
}

/// What a collection says of each of its plans at a size: whether it has a time, and why it does not do the call.
fn said(plans: &AlgorithmCollection, bytes: usize) -> Vec<(bool, String)> {
    let explained = plans.explain("allreduce", DType::F32, bytes);
    explained.into_iter().map(|each| (each.time.is_some(), each.why_not.unwrap_or_default())).collect()
}

fn the_fastest(world_size: usize) {
    let ranks = world_size as u32;
    let [wide, narrow] = [4, 1].map(|instances| {
        let mut setting = Setting::new(ranks);
        setting.options.instances = instances;
        proved(find("push-two-shot-all-reduce").unwrap().plan(&setting).unwrap())
    });
    let ring = plan("ring-all-reduce", ranks, ReduceOp::Sum, u64::MAX);
    let greatest = plan("push-two-shot-all-reduce", ranks, ReduceOp::Max, u64::MAX);
    assert!(wide.report().in_rank_order && narrow.report().in_rank_order);
    assert_eq!(ring.report().in_rank_order, world_size == 1);
    let sizes = 1 << 10..=4 << 10;
    on_gpus(world_size, |rank| {
        let (comm, context) = (&rank.comm, &rank.context);
        let ours = &CudaCollectives::new(comm, context)?;
        let peer = (rank, ours);
        let collection = |plans: &[&VerifiedPlan]| -> Outcome<AlgorithmCollection> {
            let mut collection = AlgorithmCollection::new(comm);
            for plan in plans {
                collection.add(comm, context, plan, &[], CudaOptions::default())?;
            }
            Ok(collection)
        };
        let all = [&wide, &ring, &greatest, &narrow];
        let mut plans = collection(&all)?;
        plans.tune(comm, ours, "allreduce", DType::F32, sizes.clone())?;
        let bytes = 4 * 256 * world_size;
        plans.prepare(comm, ours, "allreduce", DType::F32, bytes)?;
        let sum = (world_size * (world_size + 19) / 2) as f32;
        assert_eq!(called(peer, &plans, "allreduce", bytes / 4)?, [sum; 2]);
        let first = said(&plans, bytes);
        assert_eq!(
            first.iter().map(|(time, _)| *time).collect::<Vec<_>>(),
            [true, false, false, true],
            "{first:?}"
        );
        for (_, why_not) in &first[1..3] {
            assert!(why_not.starts_with("it has other results than "), "{first:?}");
        }
        assert_eq!(first.iter().filter(|(_, why_not)| why_not.is_empty()).count(), 1, "{first:?}");
        // All ranks choose alike, and a collection of the same plans finds the times.
        assert!(comm.exchange_objects(&first)?.iter().all(|theirs| *theirs == first));
        let mut again = collection(&all)?;
        again.prepare(comm, ours, "allreduce", DType::F32, bytes)?;
        assert_eq!(said(&again, bytes), first);

        let mut other_bits = collection(&[&wide, &ring])?.allow_other_bits();
        other_bits.tune(comm, ours, "allreduce", DType::F32, sizes.clone())?;
        assert!(said(&other_bits, bytes).iter().all(|(time, _)| *time));
        let none = plans.tune(comm, ours, "broadcast", DType::F32, sizes.clone()).unwrap_err();
        assert!(matches!(none, ExecutorError::NoPlan { .. }), "{none}");
        Ok(())
    });
}

#[test]
fn a_measurement_chooses_among_plans_of_equal_bits_on_2() {
    the_fastest(2);
}

#[test]
fn a_measurement_chooses_among_plans_of_equal_bits_on_3() {
    the_fastest(3);
}

/// Elements of a block: a few vectors and a rest.
const BLOCK: usize = 37;

fn the_built_in_call(world_size: usize) {
    let ranks = world_size as u32;
    let sum = plan("push-two-shot-all-reduce", ranks, ReduceOp::Sum, u64::MAX);
    let greatest = plan("push-two-shot-all-reduce", ranks, ReduceOp::Max, u64::MAX);
    let gather = plan("direct-all-gather", ranks, ReduceOp::Sum, u64::MAX);
    on_gpus(world_size, |rank| {
        let (comm, context, ours) = (&rank.comm, &rank.context, &collectives(rank)?);
        let peer = (rank, ours);
        let mut plans = AlgorithmCollection::new(comm);
        let refused = plans.add_built_in(ours, ReduceOp::Prod).unwrap_err();
        assert!(refused.to_string().ends_with("plans reduce by sum, min, max, not by prod"), "{refused}");
        plans.add(comm, context, &greatest, &[DType::I32], CudaOptions::default())?;
        plans.add_built_in(ours, ReduceOp::Sum)?;
        for plan in [&sum, &gather] {
            plans.add(comm, context, plan, &[], CudaOptions::default())?;
        }
        let whole = BLOCK * world_size;
        let chosen = |plans: &AlgorithmCollection, collective, dtype: DType, bytes| {
            Ok::<_, ExecutorError>(match plans.choose(collective, dtype, bytes)? {
                Choice::Plan(plan) => plan.plan().collective.clone(),
                Choice::BuiltIn(_) => "built-in".to_owned(),
            })
        };
        // Untuned, the first that serves.
        assert_eq!(chosen(&plans, "allreduce", DType::F32, 4 * whole)?, "built-in");
        assert_eq!(chosen(&plans, "allreduce", DType::I32, 64 * world_size)?, "allreduce");
        assert_eq!(chosen(&plans, "allgather", DType::U8, whole)?, "built-in");
        let none = chosen(&plans, "allgather", DType::F32, 4 * whole + 4).unwrap_err().to_string();
        assert!(none.contains(&format!("no multiple of {}", 4 * world_size)), "{none}");
        let none = chosen(&plans, "sendrecv", DType::F32, 64).unwrap_err().to_string();
        assert!(none.contains("\"built-in\": it does not do sendrecv"), "{none}");
        let explained = plans.explain("allreduce", DType::I32, 64 * world_size);
        assert_eq!(explained[1].why_not.as_deref(), Some("it does not reduce i32 by sum"));
        assert!(explained[1].plan.is_none() && explained[0].why_not.is_none());

        // What each operation gives.
        let input = |rank: usize, count: usize| -> Vec<f32> {
            (0..count).map(|index| (rank * 1000 + index) as f32).collect()
        };
        let (me, all) = (comm.rank(), 0..world_size);
        let gathered: Vec<f32> = all.clone().flat_map(|rank| input(rank, BLOCK)).collect();
        let block = |index| all.clone().map(|rank| input(rank, whole)[me * BLOCK + index]).sum::<f32>();
        let scattered: Vec<f32> = (0..BLOCK).map(block).collect();
        let exchanged: Vec<f32> =
            all.clone().flat_map(|rank| input(rank, whole)[me * BLOCK..][..BLOCK].to_vec()).collect();
        for (collective, expected) in
            [("allgather", gathered), ("reducescatter", scattered), ("alltoall", exchanged)]
        {
            let count = if collective == "allgather" { BLOCK } else { whole };
            plans.prepare(comm, ours, collective, DType::F32, 4 * whole)?;
            assert_eq!(
                call(peer, &plans, collective, &input(me, count), expected.len())?,
                expected,
                "{collective}"
            );
        }

        // The bits of a plan that reduces in the order of the ranks, and so a measurement chooses among both.
        let count = 64 * world_size;
        let mine = values::<f32>(me, count, 3);
        plans.prepare(comm, ours, "allreduce", DType::F32, 4 * count)?;
        let by_hand = call(peer, &plans, "allreduce", &mine, count)?;
        let mut planned = AlgorithmCollection::new(comm);
        planned.add(comm, context, &sum, &[], CudaOptions::default())?;
        planned.add_built_in(ours, ReduceOp::Max)?;
        planned.prepare(comm, ours, "allreduce", DType::F32, 4 * count)?;
        let by_plan = call(peer, &planned, "allreduce", &mine, count)?;
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&by_hand), bits(&by_plan));
        plans.tune(comm, ours, "allreduce", DType::F32, 1 << 10..=2 << 10)?;
        let timed: Vec<_> = said(&plans, 1 << 10).into_iter().map(|(time, _)| time).collect();
        assert_eq!(timed, [false, true, true, false]);
        // Of another operator it is no candidate.
        planned.tune(comm, ours, "allreduce", DType::F32, 1 << 10..=2 << 10)?;
        let other = said(&planned, 512 * world_size);
        assert_eq!(other.iter().map(|(time, _)| *time).collect::<Vec<_>>(), [true, false], "{other:?}");
        assert!(other[1].1.starts_with("it has other results than "), "{other:?}");
        // The fastest does the call.
        assert_eq!(bits(&call(peer, &plans, "allreduce", &mine, count)?), bits(&by_hand));
        planned.free(comm)?;
        Ok(plans.free(comm)?)
    });
}

#[test]
fn the_built_in_call_is_a_candidate_on_2() {
    the_built_in_call(2);
}

#[test]
fn the_built_in_call_is_a_candidate_on_3() {
    the_built_in_call(3);
}
