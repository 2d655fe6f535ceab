//! A rank that cannot go on: its peers hear of it at once, and no sum looks like one that was made.

use std::{
    mem::ManuallyDrop,
    sync::Mutex,
    time::{Duration, Instant},
};

use antiphon_device::cuda::Graph;
use antiphon_fabric::LocalWorld;
use antiphon_moe::{MoeConfig, SlotFormat};
use antiphon_tensor::{DType, bf16};
use antiphon_testing::{Need, need};

use crate::{
    Calls, DEADLINE, OnGpu, Outcome, Rank, by_expert,
    cases::{
        by_expert::ByExpertCase,
        by_token::Case,
        slots::{SMALL, SlotCase},
    },
    check, gpus, on_host, slots, that_may_fail,
};

type FailAllocation = unsafe extern "C" fn(usize, usize) -> u32;

/// The emulator's function that lets an allocation fail. No other driver can be asked.
fn fail_allocation() -> Option<FailAllocation> {
    // SAFETY: the library is the driver, which is loaded already or not there.
    let driver = unsafe { libloading::Library::new("libcuda.so.1") };
    let found = driver.and_then(|driver| {
        let driver = ManuallyDrop::new(driver); // it is never closed
        // SAFETY: the emulator's function has this type.
        unsafe { driver.get::<FailAllocation>(b"antiphon_emulator_fail_allocation\0") }
            .map(|function| *function)
    });
    need(Need::Emulator("allocations that fail"), found)
}

/// Lets rank 0's `nth` allocation from now on fail.
fn fail_the(nth: usize, rank: &Rank, fail: FailAllocation) {
    if rank.comm.rank() == 0 {
        // SAFETY: it takes two numbers.
        assert_eq!(unsafe { fail(rank.context.device().ordinal() as usize, nth) }, 0);
    }
}

fn case(world: usize) -> Case {
    Case { dtype: DType::F32, tokens: vec![40; world], ..Case::new(world, 2 * world, 2) }
}

fn by_expert_case(world: usize) -> ByExpertCase {
    ByExpertCase { dtype: DType::F32, tokens: vec![40; world], ..ByExpertCase::new(world, 2) }
}

/// The tensors of a case of the test, which are allocated before it exchanges counts.
const TENSORS: usize = 6;
/// The tensors of a case by expert, with the words of its routes.
const BY_EXPERT_TENSORS: usize = 4;

/// Without memory for the words of routes nothing has happened, and the call may be made again. The peers wait for it meanwhile.
#[test]
fn no_memory_before_counts_are_exchanged_is_a_refusal_on_2_gpus() {
    let (Some(_), Some(fail)) = (gpus(2), fail_allocation()) else { return };
    that_may_fail(2, MoeConfig::for_gpus(), |rank| {
        let case = case(2);
        if rank.comm.rank() == 0 {
            fail_the(TENSORS + 1, rank, fail);
            let layout = antiphon_moe::layout(&crate::inputs(&case, 0)[1].view(), case.num_experts, 2)?;
            let error =
                Calls::new(rank, &case, &layout).map(drop).expect_err("there is no memory").to_string();
            assert!(error.contains("OUT_OF_MEMORY"), "{error}");
        }
        check(rank, &case)
    });
}

/// Without memory for what comes of the counts, the peers hear of it while they wait in the dispatch.
fn no_memory_behind_the_counts(
    world: usize,
    nth: usize,
    dispatch: impl Fn(&mut Rank, &dyn Fn(&Rank)) -> Outcome + Sync,
) {
    let (Some(_), Some(fail)) = (gpus(world), fail_allocation()) else { return };
    let failed_at = Mutex::new(None);
    that_may_fail(world, MoeConfig::for_gpus(), |rank| {
        let outcome = dispatch(rank, &|rank| fail_the(nth, rank, fail));
        if rank.comm.rank() == 0 {
            *failed_at.lock().unwrap() = Some(Instant::now());
            let error = outcome.expect_err("there is no memory").to_string();
            assert!(error.contains("OUT_OF_MEMORY"), "{error}");
            // The memory of kernels goes when no rank's runs any more.
            return Ok(rank.stream.borrow().synchronize_within(Duration::from_secs(20)).map(drop)?);
        }
        let error = outcome.and_then(|()| {
            rank.stream.borrow().synchronize_within(Duration::from_secs(20))?;
            rank.moe.check()?;
            Ok(())
        });
        let heard_at = Instant::now();
        let error = error.expect_err("rank 0 has sent nothing").to_string();
        assert!(error.contains("rank 0"), "{error}");
        if let Some(failed_at) = *failed_at.lock().unwrap() {
            let took = heard_at.saturating_duration_since(failed_at);
            // Well before the deadline, also where eight ranks' blocks share two cores.
            assert!(took < DEADLINE / 2, "rank {} heard after {took:?}", rank.comm.rank());
        }
        Ok(())
    });
}

fn rows_without_memory(world: usize) {
    no_memory_behind_the_counts(world, TENSORS + 2, |rank, fails| {
        let case = case(rank.comm.world_size());
        let (layout, ..) = on_host(rank, &case)?;
        fails(rank);
        Calls::new(rank, &case, &layout)?.dispatch(rank)
    });
}

fn by_expert_rows_without_memory(world: usize) {
    no_memory_behind_the_counts(world, BY_EXPERT_TENSORS + 1, |rank, fails| {
        let case = by_expert_case(rank.comm.world_size());
        fails(rank);
        by_expert::Calls::new(rank, &case)?.dispatch(rank)
    });
}

#[test]
fn peers_hear_of_a_rank_without_memory_on_2_gpus() {
    rows_without_memory(2);
    by_expert_rows_without_memory(2);
}

#[test]
fn peers_hear_of_a_rank_without_memory_on_3_gpus() {
    rows_without_memory(3);
}

#[test]
fn peers_hear_of_a_rank_without_memory_on_4_gpus() {
    by_expert_rows_without_memory(4);
}

#[test]
fn peers_hear_of_a_rank_without_memory_on_8_gpus() {
    rows_without_memory(8);
}

/// The peers are told at once: one of three attempts is not delayed by what else the machine does.
fn is_told_soon(world: usize) {
    let (Some(_), Some(fail)) = (gpus(world), fail_allocation()) else { return };
    let mut times = (0..3).map(|_| time_to_tell(world, fail));
    assert!(times.any(|took| took < Duration::from_millis(100)), "each time some rank heard later");
}

/// After what time the last peer hears that rank 0 has no memory. The peers look at what the host knows and run no kernel meanwhile, whose
/// threads would take the processor from those that tell.
fn time_to_tell(world: usize, fail: FailAllocation) -> Duration {
    let (failed_at, longest) = (Mutex::new(None), Mutex::new(Duration::ZERO));
    that_may_fail(world, MoeConfig::for_gpus(), |rank| {
        let case = case(world);
        let (layout, ..) = on_host(rank, &case)?;
        fail_the(TENSORS + 2, rank, fail);
        let calls = Calls::new(rank, &case, &layout).map(drop);
        if rank.comm.rank() == 0 {
            *failed_at.lock().unwrap() = Some(Instant::now());
            let error = calls.expect_err("there is no memory").to_string();
            assert!(error.contains("OUT_OF_MEMORY"), "{error}");
            return Ok(());
        }
        let start = Instant::now();
        let heard = loop {
            match rank.moe.check() {
                Ok(()) if start.elapsed() < DEADLINE => std::thread::sleep(Duration::from_millis(1)),
                outcome => break outcome,
            }
        };
        let heard_at = Instant::now();
        let error = heard.expect_err("rank 0 has failed").to_string();
        assert!(error.contains("rank 0"), "{error}");
        // A peer may hear of it before rank 0 has returned.
        let failed_at = *failed_at.lock().unwrap();
        let took =
            failed_at.map_or(Duration::ZERO, |failed_at| heard_at.saturating_duration_since(failed_at));
        let mut longest = longest.lock().unwrap();
        *longest = took.max(*longest);
        Ok(())
    });
    longest.into_inner().unwrap()
}

#[test]
fn a_rank_without_memory_tells_its_peers_within_100_ms_on_2_gpus() {
    is_told_soon(2);
}

#[test]
fn a_rank_without_memory_tells_its_peers_within_100_ms_on_3_gpus() {
    is_told_soon(3);
}

#[test]
fn a_rank_without_memory_tells_its_peers_within_100_ms_on_4_gpus() {
    is_told_soon(4);
}

#[test]
fn a_rank_without_memory_tells_its_peers_within_100_ms_on_8_gpus() {
    is_told_soon(8);
}

/// Whichever allocation of rank 0 fails, the first ones of its life or those of a call: its peers hear of it and do not wait until the
/// deadline. (Memory of the tests counts too: a rank without it leaves.)
fn whichever_allocation_fails(world: usize, config: MoeConfig, calls: impl Fn(&mut Rank) -> Outcome + Sync) {
    let (Some(driver), Some(fail)) = (gpus(world), fail_allocation()) else { return };
    let fails_at = |nth: usize| {
        let outcomes = LocalWorld::run_with(world, DEADLINE, |comm| {
            if comm.rank() == 0 {
                // SAFETY: it takes two numbers.
                unsafe { fail(0, nth) };
            }
            let start = Instant::now();
            let outcome = Rank::new(driver, comm, config).and_then(|mut rank| calls(&mut rank));
            (outcome.map_err(|error| error.to_string()), start.elapsed())
        });
        // SAFETY: as above.
        unsafe { fail(0, 0) };
        let has_failed = outcomes[0].0.is_err();
        for (rank, (outcome, took)) in outcomes.into_iter().enumerate() {
            assert!(took < DEADLINE / 2, "allocation {nth}: rank {rank} ended after {took:?}");
            let cause = if rank == 0 { "OUT_OF_MEMORY" } else { "rank 0" };
            let error = outcome.err().unwrap_or_default();
            assert!(!has_failed || error.contains(cause), "allocation {nth}, rank {rank}: {error:?}");
            assert!(has_failed || error.is_empty(), "rank {rank}: {error}");
        }
        has_failed
    };
    // Without a failure first: kernels are compiled then, which takes its time.
    assert!(!fails_at(usize::MAX));
    let allocations = (1..).take_while(|&nth| fails_at(nth)).count();
    assert!(allocations > TENSORS, "{allocations} allocations");
}

#[test]
fn whichever_allocation_fails_the_peers_hear_of_it_on_2_gpus() {
    whichever_allocation_fails(2, MoeConfig::for_gpus(), |rank| check(rank, &case(2)));
    whichever_allocation_fails(2, MoeConfig::for_gpus(), |rank| by_expert::check(rank, &by_expert_case(2)));
}

#[test]
fn whichever_allocation_fails_the_peers_hear_of_it_on_3_gpus() {
    whichever_allocation_fails(3, MoeConfig::for_gpus(), |rank| check(rank, &case(3)));
}

fn is_nan(dtype: DType, element: &[u8]) -> bool {
    match dtype {
        DType::F32 => f32::from_ne_bytes(element.try_into().expect("4 bytes")).is_nan(),
        _ => bf16::from_ne_bytes(element.try_into().expect("2 bytes")).is_nan(),
    }
}

/// The last rank does not come to a combine. The others' sums were made before, are filled with something else, and are made by two
/// launches of a graph: an element is right or NaN after the first, and NaN after the second.
fn sums_in_vain<C>(
    rank: &mut Rank,
    calls: &mut C,
    combine: impl Fn(&mut C, &Rank) -> Outcome,
    sums: impl Fn(&C) -> &OnGpu,
) -> Outcome {
    let right = rank.download(sums(calls))?;
    rank.comm.barrier()?;
    if rank.comm.rank() + 1 == rank.comm.world_size() {
        std::thread::sleep(Duration::from_secs(4));
        return Ok(());
    }
    rank.comm.monitor().set_timeout(Duration::from_millis(400));
    let stream = rank.stream.clone();
    let graph = Graph::capture(&stream, |_| combine(calls, rank))?.instantiate()?;
    let dtype = sums(calls).dtype;
    for launch in 0..2 {
        let stale = vec![0x41; right.len()];
        sums(calls).memory.write(&stream, 0, &stale)?;
        // SAFETY: what the graph uses lives until the stream has been waited for.
        unsafe { graph.launch(&stream) }?;
        let mut found = vec![0; right.len()];
        sums(calls).memory.read(&stream, 0, &mut found)?;
        let size = dtype.size();
        let mut nans = 0;
        for (index, (element, right)) in found.chunks(size).zip(right.chunks(size)).enumerate() {
            let is_nan = is_nan(dtype, element);
            nans += usize::from(is_nan);
            assert!(
                is_nan || (launch == 0 && element == right),
                "element {index} after launch {launch}: {element:x?}"
            );
        }
        assert!(nans > 0, "nobody would notice");
    }
    let error = rank.moe.check().expect_err("a rank did not come").to_string();
    assert!(error.contains(&format!("{}", rank.comm.world_size() - 1)), "{error}");
    Ok(())
}

fn in_vain(world: usize) {
    that_may_fail(world, MoeConfig::for_gpus(), |rank| {
        let case = case(world);
        let (layout, ..) = on_host(rank, &case)?;
        let mut calls = Calls::new(rank, &case, &layout)?;
        calls.run(rank)?;
        sums_in_vain(rank, &mut calls, |calls, rank| calls.combine(rank), |calls| &calls.sums[0])
    });
    that_may_fail(world, MoeConfig::for_gpus(), |rank| {
        let mut calls = by_expert::Calls::new(rank, &by_expert_case(world))?;
        calls.run(rank)?;
        sums_in_vain(rank, &mut calls, |calls, rank| calls.combine(rank), |calls| &calls.sums[0])
    });
    that_may_fail(world, SMALL, |rank| {
        let case = SlotCase::new(case(world), SlotFormat::Bf16);
        let mut calls = slots::Calls::new(rank, &case)?;
        let routes = calls.dispatch(rank, rank.moe.slots()?)?;
        calls.combine(rank, rank.moe.slots()?, &routes)?;
        let combine =
            |calls: &mut slots::Calls<'_>, rank: &Rank| calls.combine(rank, rank.moe.slots()?, &routes);
        sums_in_vain(rank, &mut calls, combine, |calls| &calls.sums)
    });
}

#[test]
fn sums_that_waited_in_vain_and_those_behind_them_are_nan_on_2_gpus() {
    in_vain(2);
}

#[test]
fn sums_that_waited_in_vain_and_those_behind_them_are_nan_on_3_gpus() {
    in_vain(3);
}
