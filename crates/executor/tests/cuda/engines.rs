//! Copy engines that do the work of ports: the host's bits, also in graphs and on registered tensors, and failures.

use std::{
    fs,
    time::{Duration, Instant},
};

use antiphon_device::cuda::Graph;
use antiphon_executor::{
    ExecutorError, Waiting,
    cuda::{CudaOptions, Form, Ports},
};
use antiphon_language::library::{Setting, find};
use antiphon_plan::{ChannelType, Plan, verify::VerifiedPlan};
use antiphon_tensor::bf16;
use antiphon_testing::gpus;

use crate::{
    graphs::GraphError,
    harness::{Both, COMPILED, INTERPRETED, Outcome, Rank, on_gpus, proved, run},
    plans,
};

const ENGINES: CudaOptions = CudaOptions { ports: Ports::Engines, ..COMPILED };

/// Plans with ports: a put with a signal and a flush, by three blocks of each rank; a ring of all that ports do; and nodes that reduce what came.
fn plans_with_ports(ranks: usize) -> Vec<VerifiedPlan> {
    let mut setting = Setting::new(ranks as u32);
    setting.options.instances = 3;
    let hierarchical = ranks.is_multiple_of(2).then_some("hierarchical-all-reduce");
    let of_library = ["port-send-recv"].into_iter().chain(hierarchical);
    let plans = of_library.map(|name| find(name).unwrap().plan(&setting).unwrap());
    let plans: Vec<Plan> = plans.chain([plans::ring_all_gather(ranks as u32).unwrap()]).collect();
    plans.into_iter().map(proved).collect()
}

fn have_the_hosts_bits(ranks: usize) {
    for plan in plans_with_ports(ranks) {
        for form in [Form::Compiled, Form::Interpreted] {
            on_gpus(ranks, |rank| {
                let mut both = Both::load(rank, &plan, CudaOptions { form, ..ENGINES })?;
                both.compare::<f32>(1024, 0, 0)?;
                both.compare::<f32>(64, 1, 1)?;
                both.compare::<bf16>(32, 3, 2)?;
                both.compare_registered::<f32>(64, 1, 3)?;
                Ok(both.gpu.free(&rank.comm)?)
            });
        }
    }
}

#[test]
fn engines_have_the_hosts_bits_on_2() {
    have_the_hosts_bits(2);
}

#[test]
fn engines_have_the_hosts_bits_on_3() {
    have_the_hosts_bits(3);
}

#[test]
fn engines_have_the_hosts_bits_on_4() {
    have_the_hosts_bits(4);
}

/// More requests than the FIFO has slots, in a launch and in launches one behind the other.
fn slots_are_used_again(ranks: usize) {
    let plan = proved(plans::put_in_turns(ranks as u32).unwrap());
    on_gpus(ranks, |rank| {
        let mut both = Both::load(rank, &plan, ENGINES)?;
        both.prepare::<f32>(2100)?;
        both.prepare::<f32>(16)?;
        let (long, short) = (both.call::<f32>(2100, 0, 1)?, both.call::<f32>(16, 0, 2)?);
        for _ in 0..3 {
            both.queue(&long)?;
        }
        for _ in 0..100 {
            both.queue(&short)?;
        }
        both.check(&long, "of many requests")?;
        both.check(&short, "many times")
    });
}

#[test]
fn slots_are_used_again_on_2() {
    slots_are_used_again(2);
}

#[test]
fn slots_are_used_again_on_3() {
    slots_are_used_again(3);
}

/// Graphs of two plans, between eager calls of another size; each rank writes its input again behind every call.
fn replays(ranks: usize) {
    let plans = plans_with_ports(ranks);
    on_gpus(ranks, |rank| {
        for plan in &plans {
            let mut both = Both::load(rank, plan, ENGINES)?;
            both.prepare::<f32>(256)?;
            both.prepare::<f32>(64)?;
            let inputs = [both.call::<f32>(256, 0, 1)?, both.call::<f32>(256, 0, 2)?];
            let (mut call, other) = (both.call::<f32>(256, 0, 3)?, both.call::<f32>(64, 0, 4)?);
            let graph = Graph::capture(&rank.stream, |_| -> Result<(), GraphError> {
                both.queue(&call)?;
                Ok(both.queue(&call)?)
            })?;
            let graph = graph.instantiate()?;
            rank.meet()?;
            for replay in 0..10 {
                if !both.in_place {
                    both.take_input(&mut call, &inputs[replay % 2])?;
                }
                // SAFETY: all memory of the graph lives until the results are read, behind the last launch.
                unsafe { graph.launch(&rank.stream) }?;
                both.queue(&other)?;
            }
            both.check(&call, "replayed")?;
            both.check(&other, "eager")?;
        }
        Ok(())
    });
}

#[test]
fn graphs_of_requests_replay_between_eager_calls_on_2() {
    replays(2);
}

#[test]
fn graphs_of_requests_replay_between_eager_calls_on_4() {
    replays(4);
}

/// Ranks of which one has engines, and others blocks, do not load the plan.
#[test]
fn ranks_have_equal_ports_on_2() {
    let plan = proved(plans::ring_all_gather(2).unwrap());
    on_gpus(2, |rank| {
        let options = CudaOptions { ports: Ports::ALL[rank.comm.rank()], ..INTERPRETED };
        let error = Both::load(rank, &plan, options).err().expect("they differ").to_string();
        assert!(error.contains("load") || error.contains("differ"), "{error}");
        Both::load(rank, &plan, ENGINES)?.compare::<f32>(64, 0, 0)
    });
}

/// A loaded and prepared plan of two ranks, whose ranks have met.
fn ready<'a>(rank: &'a Rank, plan: &VerifiedPlan) -> Outcome<Both<'a>> {
    let mut both = Both::load(rank, plan, ENGINES)?;
    both.prepare::<f32>(64)?;
    Ok(both)
}

/// What a call ends with that cannot end well.
fn vain(rank: &Rank, both: &Both<'_>) -> Outcome<ExecutorError> {
    let call = both.unchecked::<f32>(64)?;
    rank.comm.barrier()?;
    both.queue(&call)?;
    rank.stream.borrow().synchronize()?;
    Ok(both.gpu.check().expect_err("it cannot end well"))
}

/// The rank behind waits for a signal that comes with the data, and is told that the rank has failed.
fn failing_request(ranks: usize) {
    let plan = proved(find("port-send-recv").unwrap().plan(&Setting::new(ranks as u32)).unwrap());
    let outcomes = run(ranks, Duration::from_secs(60), |rank| {
        let both = ready(rank, &plan)?;
        if rank.comm.rank() == 0 {
            both.gpu.fail_requests();
        }
        let start = Instant::now();
        let error = vain(rank, &both)?;
        assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
        rank.comm.barrier().ok();
        Ok(error)
    });
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        let text = outcome.unwrap().to_string();
        let expected = if rank == 0 { "a request that is to fail" } else { "rank 0" };
        assert!(text.contains(expected), "rank {rank}: {text}");
    }
    on_gpus(ranks, |rank| ready(rank, &plan)?.compare::<f32>(64, 0, 0));
}

#[test]
fn a_request_that_fails_is_told_to_those_who_wait_on_2() {
    failing_request(2);
}

#[test]
fn a_request_that_fails_is_told_to_those_who_wait_on_3() {
    failing_request(3);
}

/// A rank that does not come to a launch: its peers wait for its signal, and have requests under way when they give up.
#[test]
fn a_rank_that_does_not_come_is_named_at_the_deadline_by_engines_on_2() {
    let plan = proved(find("port-send-recv").unwrap().plan(&Setting::new(2)).unwrap());
    let timeout = Duration::from_secs(3);
    let outcomes = run(2, timeout, |rank| {
        let both = ready(rank, &plan)?;
        let call = both.unchecked::<f32>(64)?;
        rank.comm.barrier()?;
        for _ in 0..4 {
            both.queue(&call)?;
        }
        rank.stream.borrow().synchronize()?;
        both.gpu.check()?;
        rank.comm.barrier()?;
        if rank.comm.rank() == 1 {
            std::thread::sleep(3 * timeout);
            return Ok(None);
        }
        both.queue(&call)?;
        rank.stream.borrow().synchronize()?;
        Ok(Some(both.gpu.check().expect_err("a rank is missing")))
    });
    let Some(outcome) = outcomes.into_iter().next() else { return };
    let error = outcome.unwrap().expect("rank 0 waits");
    let text = error.to_string();
    assert!(text.contains("ranks [1] of 2"), "{text}");
    if let ExecutorError::Stuck { waiting, .. } = &error {
        assert!(matches!(waiting, Waiting::Signal { channel_type: ChannelType::Port, .. }), "{waiting:?}");
    }
    on_gpus(2, |rank| ready(rank, &plan)?.compare::<f32>(64, 0, 0));
}

#[test]
fn a_rank_that_leaves_is_named_by_engines_on_2() {
    if gpus(2).is_none() {
        return; // its memory is given back when kernels of its GPU are over
    }
    let plan = proved(find("port-send-recv").unwrap().plan(&Setting::new(2)).unwrap());
    let outcomes = run(2, Duration::from_secs(60), |rank| {
        let both = ready(rank, &plan)?;
        rank.comm.barrier()?;
        if rank.comm.rank() == 1 {
            std::thread::sleep(Duration::from_millis(100));
            return Ok(None);
        }
        let call = both.unchecked::<f32>(64)?;
        let start = Instant::now();
        both.queue(&call)?;
        rank.stream.borrow().synchronize()?;
        assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
        Ok(Some(both.gpu.check().expect_err("a rank is missing")))
    });
    let Some(outcome) = outcomes.into_iter().next() else { return };
    let text = outcome.unwrap().expect("rank 0 waits").to_string();
    assert!(text.contains("rank 1"), "{text}");
}

/// How many threads of this process hand requests on.
fn threads() -> usize {
    let names = fs::read_dir("/proc/self/task").unwrap().flatten();
    let names = names.filter_map(|task| fs::read_to_string(task.path().join("comm")).ok());
    names.filter(|name| name.starts_with("antiphon-engin")).count()
}

/// A plan that is dropped while its requests are under way ends its thread, behind them.
fn dropped(ranks: usize) {
    let plan = proved(plans::ring_all_gather(ranks as u32).unwrap());
    let before = threads();
    on_gpus(ranks, |rank| {
        let mut both = ready(rank, &plan)?;
        assert!(threads() > before);
        let calls = [both.call::<f32>(64, 0, 0)?, both.call::<f32>(64, 0, 1)?];
        calls.iter().try_for_each(|call| both.queue(call))?;
        drop(both);
        rank.comm.barrier()?;
        ready(rank, &plan)?.compare::<f32>(64, 0, 2)
    });
    assert_eq!(threads(), before);
}

#[test]
fn a_plan_that_is_dropped_ends_its_thread_on_2() {
    dropped(2);
}

#[test]
fn a_plan_that_is_dropped_ends_its_thread_on_4() {
    dropped(4);
}
