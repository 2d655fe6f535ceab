//! Launches without a meeting of the ranks: plans that are proved for it, one that is not, and ranks that disagree.

use std::time::Duration;

use antiphon_executor::{ExecutorError, cuda::CudaOptions};
use antiphon_fabric::FabricError;
use antiphon_language::library::{Setting, find};
use antiphon_plan::{Plan, verify::VerifiedPlan};

use crate::harness::{Both, Outcome, Rank, on_gpus, proved, run};

fn plan(name: &str, ranks: usize) -> Plan {
    find(name).unwrap().plan(&Setting::new(ranks as u32)).unwrap()
}

fn load<'a>(rank: &'a Rank, plan: &VerifiedPlan) -> Outcome<Both<'a>> {
    let mut both = Both::load(rank, plan, CudaOptions::default())?;
    assert_eq!(both.gpu.meets(), !plan.report().back_to_back);
    both.prepare::<f32>(64)?;
    both.prepare::<f32>(16)?;
    Ok(both)
}

/// Waits for a while that depends on the rank and the call.
fn delay(rank: &Rank, call: usize) {
    let mixed = (rank.comm.rank() + 1) * 2_654_435_761 + call * 40_503;
    std::thread::sleep(Duration::from_micros((mixed % 7 * 300) as u64));
}

/// Calls in rows of one size, between other sizes and plans; some ranks come late. Every call has tensors of its own.
fn rows(ranks: usize, names: [&str; 2], first_flag: Option<u32>) {
    let plans = names.map(|name| proved(plan(name, ranks)));
    assert!(plans.iter().all(|plan| plan.report().back_to_back));
    on_gpus(ranks, |rank| {
        let mut both = [load(rank, &plans[0])?, load(rank, &plans[1])?];
        if let Some(flag) = first_flag {
            rank.comm.barrier()?;
            both.iter().try_for_each(|both| both.gpu.set_flags(flag))?;
            rank.comm.barrier()?;
        }
        let row = [
            (0, 64),
            (0, 64),
            (0, 64),
            (0, 16),
            (0, 16),
            (1, 64),
            (1, 64),
            (1, 64),
            (0, 64),
            (0, 64),
            (0, 64),
            (0, 64),
        ];
        let mut calls = Vec::new();
        for (seed, &(which, chunk)) in row.iter().enumerate() {
            calls.push((which, both[which].call::<f32>(chunk, 0, seed)?));
        }
        for (number, (which, call)) in calls.iter().enumerate() {
            delay(rank, number);
            both[*which].queue(call)?;
        }
        calls.iter().try_for_each(|(which, call)| both[*which].check(call, "in a row"))
    });
}

#[test]
fn rows_of_calls_have_the_hosts_bits_on_2() {
    rows(2, ["one-shot-all-reduce", "push-two-shot-all-reduce"], None);
}

#[test]
fn rows_of_calls_have_the_hosts_bits_on_3() {
    rows(3, ["packet-all-reduce", "two-shot-all-reduce"], None);
}

#[test]
fn rows_of_calls_have_the_hosts_bits_on_4() {
    rows(4, ["packet-all-to-all", "ring-all-gather"], None);
}

#[test]
fn rows_of_calls_have_the_hosts_bits_on_8() {
    rows(8, ["one-shot-all-reduce", "direct-reduce-scatter"], None);
}

/// Packets are cleared, and a half of the scratch follows itself.
#[test]
fn flags_begin_anew_in_a_row_on_2() {
    rows(2, ["one-shot-all-reduce", "packet-all-reduce"], Some(u32::MAX - 2));
}

/// Rank 0 sends rank 1 packets, and takes nothing: so it ends as many launches as it likes, if the ranks do not meet.
fn one_way() -> VerifiedPlan {
    let text = r#"{"name": "one_way", "collective": "custom", "protocol": "LL", "gpus": [
        {"id": 0, "input_chunks": 1, "output_chunks": 1, "scratch_chunks": 2,
         "channels": [{"channel_type": "memory", "connected_to": [1]}],
         "remote_buffers": [{"rank": 1, "type": "s", "access_channel_types": ["memory"]}],
         "threadblocks": [{"id": 0, "channels": [{"channel_type": "memory", "channel_ids": [0]}],
             "remote_buffer_refs": [{"access_channel_type": "memory", "remote_buffer_ids": [0]}],
             "ops": [{"name": "ppkt", "src_buff": [{"type": "i", "index": 0, "size": 1}],
                      "dst_buff": [{"buffer_id": 0, "index": 0, "size": 1}], "channel_ids": [0], "channel_type": "memory"}]}]},
        {"id": 1, "input_chunks": 1, "output_chunks": 1, "scratch_chunks": 2,
         "channels": [{"channel_type": "memory", "connected_to": [0]}], "remote_buffers": [],
         "threadblocks": [{"id": 0, "channels": [], "remote_buffer_refs": [],
             "ops": [{"name": "upkt", "src_buff": [{"type": "s", "index": 0, "size": 1}],
                      "dst_buff": [{"type": "o", "index": 0, "size": 1}]}]}]}]}"#;
    proved(Plan::from_json(text.as_bytes()).unwrap())
}

/// Two launches in which rank 0 does not wait for rank 1, whose launches come later.
fn apart(meets: bool) -> Vec<Outcome> {
    let plan = one_way();
    assert!(!plan.report().back_to_back);
    run(2, Duration::from_secs(if meets { 30 } else { 2 }), |rank| {
        let mut both = Both::load(rank, &plan, CudaOptions::default())?;
        assert!(both.gpu.meets());
        both.gpu.set_meets(meets);
        both.prepare::<f32>(64)?;
        let calls = [
            both.unchecked::<f32>(64)?,
            both.unchecked::<f32>(64)?,
            both.unchecked::<f32>(64)?,
            both.unchecked::<f32>(64)?,
        ];
        rank.meet()?;
        // Behind flags that begin, ranks meet.
        calls[..2].iter().try_for_each(|call| both.queue(call))?;
        rank.stream.borrow().synchronize()?;
        rank.comm.barrier()?;
        if rank.comm.rank() == 1 {
            std::thread::sleep(Duration::from_millis(300));
        }
        calls[2..].iter().try_for_each(|call| both.queue(call))?;
        rank.stream.borrow().synchronize()?;
        let outcome = both.gpu.check();
        rank.comm.barrier().ok(); // a rank that left while the other one's kernel waits would be lost to that
        Ok(outcome?)
    })
}

/// What is proved is needed: the second launch overwrites packets that nobody has read.
#[test]
fn a_plan_that_needs_a_meeting_fails_without_on_2() {
    for (rank, outcome) in apart(true).into_iter().enumerate() {
        outcome.unwrap_or_else(|error| panic!("rank {rank}: {error}"));
    }
    let Some(outcome) = apart(false).into_iter().nth(1) else { return };
    let error = outcome.expect_err("packets were overwritten").to_string();
    assert!(error.contains("packet"), "{error}");
}

/// The error of each rank, of which the last one calls another size in a row of calls.
fn disagree(ranks: usize) {
    let plan = proved(plan("one-shot-all-reduce", ranks));
    let outcomes = run(ranks, Duration::from_secs(60), |rank| {
        let both = load(rank, &plan)?;
        let calls = [both.unchecked::<f32>(64)?, both.unchecked::<f32>(16)?];
        rank.meet()?;
        for _ in 0..4 {
            both.queue(&calls[0])?;
        }
        rank.stream.borrow().synchronize()?;
        both.gpu.check()?;
        both.queue(&calls[usize::from(rank.comm.rank() == ranks - 1)])?;
        rank.stream.borrow().synchronize()?;
        let error = both.gpu.check().expect_err("ranks disagree");
        rank.comm.barrier().ok();
        Ok(error)
    });
    let texts: Vec<String> = outcomes.into_iter().map(|outcome| outcome.unwrap().to_string()).collect();
    if let Some(last) = texts.last() {
        let told = texts.iter().filter(|text| text.contains("execute(") && text.contains("× f32")).count();
        assert!(last.contains("execute(") && told >= 2, "{texts:?}");
    }
}

#[test]
fn ranks_that_call_another_size_in_a_row_are_told_so_on_2() {
    disagree(2);
}

#[test]
fn ranks_that_call_another_size_in_a_row_are_told_so_on_3() {
    disagree(3);
}

/// A rank that does not come to a launch without a meeting.
#[test]
fn a_rank_that_is_absent_in_a_row_is_named_at_the_deadline_on_2() {
    let plan = proved(plan("one-shot-all-reduce", 2));
    let timeout = Duration::from_secs(2);
    let outcomes = run(2, timeout, |rank| {
        let both = load(rank, &plan)?;
        let call = both.unchecked::<f32>(64)?;
        rank.meet()?;
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
    let is_timeout = |reason: &FabricError| matches!(reason, FabricError::Timeout { .. });
    assert!(matches!(&error, ExecutorError::Stuck { reason, .. } if is_timeout(reason)), "{error:?}");
    assert!(error.to_string().contains("ranks [1] of 2"), "{error}");
    on_gpus(2, |rank| load(rank, &plan)?.compare::<f32>(64, 0, 0));
}
