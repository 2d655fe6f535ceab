//! The simulator against measured figures, arithmetic, and the traps that plans can be.

mod builder;

use antiphon_plan::simulate::{
    ArrowKind, Cluster, Lane, STEPS, SimulateError, Simulation, fitting, simulate,
};
use antiphon_plan::{CopyKind, OpKind, Pipeline, Plan, PutKind};
use builder::*;

fn cluster(spec: &str) -> Cluster {
    Cluster::from_spec(spec).unwrap()
}

fn play(plan: &Plan, spec: &str, bytes: u64) -> Simulation {
    simulate(plan, &cluster(spec), bytes).unwrap()
}

/// Whether a figure is within some percent of a measured one.
#[track_caller]
fn near(figure: f64, measured: f64, percent: f64) {
    let off = 100.0 * (figure / measured - 1.0);
    assert!(off.abs() <= percent, "{figure} is {off:.1} % off {measured}");
}

/// Thread blocks of rank 0 that each push to, or pull from, a peer.
fn blocks_to_a_peer(blocks: u64, push: bool) -> Plan {
    let mut builder = PlanBuilder::new("custom", 2, [blocks, blocks, 0]);
    builder.on(1, 0);
    for block in 0..blocks {
        let block_builder = builder.on(0, block as usize);
        match push {
            true => block_builder.put(Memory, 1, (Output, block, 1), (Input, block, 1)),
            false => block_builder.get(1, (Output, block, 1), (Input, block, 1)),
        };
    }
    builder.0
}

#[test]
fn one_put_is_arithmetic() {
    let costs = cluster("h200x2");
    let time = play(&blocks_to_a_peer(1, true), "h200x2", 1 << 20).time_ns;
    let expected = costs.launch_ns
        + costs.block.op_ns
        + costs.block.memory_ns
        + (1 << 20) as f64 / costs.block.store_gb_s;
    near(time, expected, 1e-9);
}

/// 4 × H200, 2026-11-21: blocks of 512 threads, 16-byte stores and loads.
#[test]
fn pushes_and_pulls_are_as_fast_as_measured() {
    let bytes = 132 << 20;
    for (blocks, push, pull) in
        [(1, 19.0, 7.4), (4, 77.0, 30.0), (8, 155.0, 59.0), (16, 311.0, 117.0), (132, 365.0, 367.0)]
    {
        let gb_s = |push| {
            let plan = blocks_to_a_peer(blocks, push);
            let bytes = fitting(&plan, bytes);
            bytes as f64 / play(&plan, "h200x4", bytes).time_ns
        };
        near(gb_s(true), push, 2.5);
        near(gb_s(false), pull, 2.5);
    }
}

/// Likewise: every GPU to all three others at once.
#[test]
fn all_to_all_pushes_share_the_links_as_measured() {
    let (ranks, blocks) = (4, 132);
    let mut builder = PlanBuilder::new("alltoall", ranks, [132, 132, 0]);
    for rank in 0..ranks {
        for block in 0..blocks {
            let peer = (rank + 1 + block % (ranks - 1)) % ranks;
            let chunk = u64::from(block);
            builder.on(rank, block as usize).put(Memory, peer, (Output, chunk, 1), (Input, chunk, 1));
        }
    }
    let bytes = fitting(&builder.0, 256 << 20);
    let done = play(&builder.0, "h200x4", bytes);
    near(bytes as f64 / done.time_ns, 311.0, 1.5);
    let out = done.links.iter().find(|link| link.name == "rank 0 link out").unwrap();
    assert_eq!(out.bytes, bytes);
    near(out.busy, 311.0 / out.capacity_gb_s, 1.5);
}

/// Likewise: st.release.sys and ld.acquire.sys, 2.71 µs for the round trip.
#[test]
fn a_signal_goes_and_comes_as_fast_as_measured() {
    let mut builder = PlanBuilder::new("custom", 2, [0, 0, 0]);
    let rounds = 100;
    for _ in 0..rounds {
        builder.on(0, 0).signal(Memory, 1).wait(Memory, 1);
        builder.on(1, 0).wait(Memory, 0).signal(Memory, 0);
    }
    near(play(&builder.0, "h200x4", 0).time_ns / f64::from(rounds), 2710.0, 5.0);
}

/// Hand-written kernels that do what the plan does, on 4 × H200, bf16, in µs: ours (data and flag in one store, of which
/// packets come closest while messages are small), and torch's with its 24 thread blocks. docs/guide/simulator.md has the table.
#[test]
fn all_reduces_are_about_as_fast_as_hand_written_ones() {
    let (packets, one_shot, two_shot) =
        (one_shot_all_reduce(4, 32), pulled_one_shot(4, 24), pulled_two_shot(4, 24));
    for (plan, bytes, measured, percent) in [
        (&packets, 14336, 2.22, 20.0),
        (&packets, 57344, 2.62, 35.0),
        (&one_shot, 4096, 6.64, 30.0),
        (&one_shot, 65536, 8.12, 40.0),
        (&one_shot, 1 << 20, 18.43, 20.0),
        (&one_shot, 4 << 20, 48.27, 10.0),
        (&two_shot, 1 << 20, 12.71, 30.0),
        (&two_shot, 4 << 20, 28.13, 10.0),
        (&two_shot, 16 << 20, 91.74, 10.0),
        (&two_shot, 64 << 20, 337.03, 10.0),
    ] {
        let time = play(plan, "h200x4", fitting(plan, bytes)).time_ns / 1e3;
        println!(
            "{bytes}: {time:.2} predicted, {measured} measured, {:+.0} %",
            100.0 * (time / measured - 1.0)
        );
        near(time, measured, percent);
    }
}

#[test]
fn a_port_is_asynchronous_and_a_flush_is_not() {
    let chunk = (Output, 0, 1);
    let run = |flush: bool| {
        let mut builder = PlanBuilder::new("custom", 2, [1, 1, 0]);
        let block_builder = builder.on(0, 0).put(Port, 1, chunk, (Input, 0, 1));
        if flush {
            block_builder.flush(1)
        } else {
            block_builder
        };
        builder.on(1, 0);
        play(&builder.0, "h200x2", 4 << 20)
    };
    let engine = cluster("h200x2").copy_engine;
    let (asynchronous, flushed) = (run(false), run(true));
    let end_of = |done: &Simulation, op: u32| {
        done.spans.iter().find(|span| span.lane == Lane::Block && span.place.op == op).unwrap().end_ns
    };
    near(end_of(&asynchronous, 0), 50.0 + engine.issue_ns + 450.0, 1.0);
    let transfer = flushed.spans.iter().find(|span| matches!(span.lane, Lane::CopyEngine(_))).unwrap();
    near(transfer.end_ns - transfer.start_ns, (4 << 20) as f64 / engine.gb_s, 1e-6);
    near(end_of(&flushed, 1), transfer.end_ns + engine.latency_ns + 50.0, 1e-6);
}

#[test]
fn an_engine_does_one_transfer_after_the_other_and_signals_behind_them() {
    let mut builder = PlanBuilder::new("custom", 2, [2, 2, 0]);
    for at in 0..2 {
        builder.on(0, 0).put_as(PutKind::WithSignal, Port, 1, (Output, at, 1), (Input, at, 1));
        builder.on(1, 0).wait(Port, 0);
    }
    let done = play(&builder.0, "h200x2", 8 << 20);
    let transfers: Vec<_> = done.spans.iter().filter(|span| span.lane != Lane::Block).collect();
    assert_eq!(transfers[1].start_ns, transfers[0].end_ns);
    let signals: Vec<_> = done.arrows.iter().filter(|arrow| arrow.kind == ArrowKind::Signal).collect();
    assert!(signals.iter().zip(transfers).all(|(signal, transfer)| signal.arrived_ns > transfer.end_ns));
    assert_eq!(signals.len(), 2);
}

#[test]
fn packets_are_read_as_they_come() {
    let mut builder = PlanBuilder::new("custom", 2, [1, 1, 1]);
    builder.on(0, 0).put_as(PutKind::Packets, Memory, 1, (Scratch, 0, 1), (Input, 0, 1));
    builder.on(1, 0).copy(CopyKind::Unpack, (Output, 0, 1), (Scratch, 0, 1));
    let costs = cluster("h200x2");
    let bytes = 1 << 20;
    let sent = 500.0 + 2.0 * f64::from(bytes) / costs.block.store_gb_s;
    let read = costs.link.latency_ns + costs.block.op_ns + costs.block.memory_ns;
    near(play(&builder.0, "h200x2", 1 << 20).time_ns, costs.launch_ns + sent + read, 0.1);
}

#[test]
fn semaphores_and_barriers_order_thread_blocks() {
    let mut builder = PlanBuilder::new("custom", 1, [1, 1, 0]);
    builder.on(0, 0).copy(CopyKind::Plain, (Output, 0, 1), (Input, 0, 1)).semaphore(false).barrier(0, 2);
    builder.on(0, 1).semaphore(true).copy(CopyKind::Plain, (Output, 0, 1), (Input, 0, 1)).barrier(0, 2);
    let done = play(&builder.0, "h200x1", 1 << 20);
    let span = |block: u32, op: u32| {
        *done.spans.iter().find(|span| (span.place.threadblock.0, span.place.op) == (block, op)).unwrap()
    };
    assert!(span(1, 1).start_ns > span(0, 0).end_ns);
    assert_eq!(span(0, 2).end_ns, span(1, 2).end_ns);
    let path: Vec<_> =
        done.critical_path().iter().map(|step| done.spans[step.span.index()].place.to_string()).collect();
    let expected = ["block 0, op 0", "block 0, op 1", "block 1, op 0", "block 1, op 1", "block 1, op 2"];
    assert_eq!(path, expected.map(|place| format!("rank 0, thread {place}")));
}

#[test]
fn a_pipeline_turns_as_often_as_the_message_needs() {
    let mut builder = PlanBuilder::new("custom", 2, [1, 1, 0]);
    builder.on(1, 0);
    builder.on(0, 0).put(Memory, 1, (Output, 0, 1), (Input, 0, 1));
    let block = &mut builder.0.gpus[0].threadblocks[0];
    let ops = std::mem::take(&mut block.ops);
    block.ops = vec![OpKind::Pipeline(Pipeline { unit_size: 1 << 20, num_chunks: 1, ops }).into()];
    let done = play(&builder.0, "h200x2", (2 << 20) + 512);
    let turns: Vec<_> = done.spans.iter().map(|span| (span.turn, span.bytes)).collect();
    assert_eq!(turns, [(0, 1 << 20), (1, 1 << 20), (2, 512)]);
    let block = &mut builder.0.gpus[0].threadblocks[0];
    let OpKind::Pipeline(pipeline) = &mut block.ops[0].kind else { unreachable!() };
    pipeline.num_chunks = u64::MAX;
    let error = simulate(&builder.0, &cluster("h200x2"), 1 << 20).unwrap_err();
    assert!(matches!(error, SimulateError::TooLong { .. }), "{error}");
}

#[test]
fn a_deadlock_names_the_blocks_and_what_they_wait_for() {
    let mut builder = PlanBuilder::new("custom", 2, [1, 1, 1]);
    builder.on(0, 0).nop().wait(Memory, 1).signal(Memory, 1);
    builder.on(0, 1).barrier(3, 2);
    builder.on(1, 0).wait(Memory, 0).signal(Memory, 0);
    builder.on(1, 1).semaphore(true);
    builder.on(1, 2).copy(CopyKind::Unpack, (Output, 0, 1), (Scratch, 0, 1));
    let error = simulate(&builder.0, &cluster("h200x2"), 64).unwrap_err().to_string();
    assert_eq!(
        error,
        "deadlock after 20 ns: 5 of 5 thread blocks wait for ever: \
         rank 0, thread block 0, op 1 waits for a signal of rank 1 through memory channel 0; \
         rank 0, thread block 1, op 0 waits for barrier 3, where 1 of 2 thread blocks are; \
         rank 1, thread block 0, op 0 waits for a signal of rank 0 through memory channel 0; \
         rank 1, thread block 1, op 0 waits for a release of semaphore 0; and 1 more"
    );
}

#[test]
fn memory_does_not_reach_other_nodes_and_ports_need_a_card() {
    let mut builder = PlanBuilder::new("custom", 4, [1, 1, 0]);
    builder.on(1, 0).put(Memory, 2, (Output, 0, 1), (Input, 0, 1));
    let error = simulate(&builder.0, &cluster("h200x2-nodes2"), 64).unwrap_err().to_string();
    assert_eq!(error, "rank 1, thread block 0, op 0: no mapped memory (another node) from rank 1 to rank 2");
    let error = simulate(&builder.0, &cluster("h200x3"), 64).unwrap_err().to_string();
    assert_eq!(error, "the plan has 4 ranks, cluster \"h200x3\" has 3 GPUs");
}

#[test]
fn a_hierarchical_all_reduce_is_bound_by_the_cards_and_always_the_same() {
    let (nodes, gpus) = (8, 4);
    let plan = hierarchical_all_reduce(nodes, gpus);
    let bytes = 64 << 20;
    let done = play(&plan, "h200x4-nodes8", bytes);
    assert_eq!(done, play(&plan, "h200x4-nodes8", bytes));
    // Each card sends 2 (nodes - 1)/nodes of its GPU's part, between puts of all other GPUs' parts before and of its own after.
    let part = bytes as f64 / f64::from(gpus);
    let cards = part * 2.0 * f64::from(nodes - 1) / f64::from(nodes) / 48.0;
    let links = 2.0 * f64::from(gpus - 1) * part / 19.3;
    assert!(
        done.time_ns > cards + links && done.time_ns < 1.5 * (cards + links),
        "{} {cards} {links}",
        done.time_ns
    );
    let path = done.critical_path();
    assert!(path.windows(2).all(|pair| pair[0].until_ns == pair[1].from_ns), "without gaps");
    assert_eq!(path.last().unwrap().until_ns + 510.0, done.time_ns);
    assert!(path.iter().any(|step| matches!(done.spans[step.span.index()].lane, Lane::Nic(_))));
}

#[test]
fn a_switch_reduces_and_replicates_where_the_cluster_has_multicast() {
    let ranks = 4;
    let mut builder = PlanBuilder::new("allreduce", ranks, [ranks.into(), ranks.into(), 0]);
    for rank in 0..ranks {
        builder.on(rank, 0).switch_all_reduce(u64::from(rank), (0..ranks).collect());
    }
    let bytes = 4 << 20;
    let carried = |spec: &str| {
        let done = play(&builder.0, spec, bytes);
        let of = |way: &str| {
            done.links.iter().find(|link| link.name == format!("rank 0 link {way}")).unwrap().bytes
        };
        [of("out"), of("in")]
    };
    let part = bytes / u64::from(ranks);
    // With loads and stores, three parts leave for the others' sums, and three copies of the own sum; as many come.
    assert_eq!(carried("h200x4"), [6 * part, 6 * part]);
    // In the switch the others' sums take three parts out, and the own sum leaves once; the same way back.
    assert_eq!(carried(r#"{"base": "h200x4", "link": {"multicast": true}}"#), [4 * part, 4 * part]);
}

#[test]
fn a_cluster_is_described_by_what_differs_and_every_figure_is_checked() {
    let differs =
        cluster(r#"{"base": "h200x8-nodes4", "name": "mine", "nics_per_node": 2, "block": {"op_ns": 1}}"#);
    assert_eq!((differs.gpus(), differs.nics_per_node, differs.block.op_ns), (32, 2, 1.0));
    assert_eq!(differs.block.sync_ns, cluster("h200x8").block.sync_ns);
    for (spec, expected) in [
        ("h100x8", "\"h100x8\" is no cluster: write h200xG"),
        ("h200x9", "\"h200x9\" is no cluster"),
        ("h200x8-nodes0", "is no cluster"),
        (r#"{"base": "h200x8", "speed": 1}"#, "the cluster's description: unknown field `speed`"),
        (
            r#"{"base": "h200x8", "link": {"latency_ns": -1}}"#,
            "link.latency_ns is -1, not between 0 and 10^12 ns",
        ),
        (r#"{"base": "h200x8", "memory_gb_s": 0}"#, "memory_gb_s is 0, not between 10^-3 and 10^9 GB/s"),
        (r#"{"base": "h200x8", "nodes": 1e99}"#, "the cluster's description: invalid"),
    ] {
        let error = Cluster::from_spec(spec).unwrap_err().to_string();
        assert!(error.contains(expected), "{spec}: {error}");
    }
}

/// Each card sends less than twice its GPU's part, however many nodes there are. With `NODES=128` and --release it shows how long a
/// thousand ranks take.
#[test]
fn over_many_nodes_each_card_sends_as_much() {
    let most = std::env::var("NODES").map_or(16, |nodes| nodes.parse().expect("NODES is a number"));
    let (gpus, bytes) = (8, 1 << 30);
    let time_ns = |nodes: u32| {
        let start = std::time::Instant::now();
        let done = play(&hierarchical_all_reduce(nodes, gpus), &format!("h200x8-nodes{nodes}"), bytes);
        println!(
            "{nodes} nodes in {:.1?}: {} spans, {:.0} µs",
            start.elapsed(),
            done.spans.len(),
            done.time_ns / 1e3
        );
        done.time_ns
    };
    // As in the test above: a card's part, and puts of all other GPUs' parts.
    let part = bytes as f64 / f64::from(gpus);
    let bound = 2.0 * part / 48.0 + 2.0 * f64::from(gpus - 1) * part / 19.3;
    let (few, many) = (time_ns(2), time_ns(most));
    assert!(few < many && many < 1.5 * bound, "{few} ns on 2 nodes, {many} on {most}, at least {bound}");
}

/// Rank 0 with `blocks` thread blocks, each of which copies `each` times.
fn copies(blocks: usize, each: usize) -> Plan {
    let mut builder = PlanBuilder::new("custom", 1, [1, 1, 1]);
    for block in 0..blocks {
        for _ in 0..each {
            builder.on(0, block).copy(CopyKind::Plain, (Output, 0, 1), (Input, 0, 1));
        }
    }
    builder.0
}

/// A span, its arrows and its place on the critical path take some 200 bytes.
const _: () = assert!(STEPS <= 1 << 20);

#[test]
fn what_a_short_plan_may_ask_for_has_a_limit() {
    let mut plan = copies(1, 1);
    let ops = std::mem::take(&mut plan.gpus[0].threadblocks[0].ops);
    // An operation and its two accesses are three steps; the pipeline and the operation in it allow four each.
    let most = STEPS + 2 * 4;
    let turns = most / 3;
    for (num_chunks, fits) in [(turns, true), (turns + 1, false)] {
        plan.gpus[0].threadblocks[0].ops =
            vec![OpKind::Pipeline(Pipeline { unit_size: 16, num_chunks, ops: ops.clone() }).into()];
        match (simulate(&plan, &cluster("h200x1"), 16), fits) {
            (Ok(done), true) => assert_eq!(done.spans.len() as u64, turns),
            (Err(SimulateError::TooLong { steps, limit }), false) => {
                assert_eq!((steps, limit), (3 * num_chunks, most));
            }
            (other, _) => panic!("{num_chunks}: {other:?}"),
        }
    }
}

#[test]
fn a_cluster_of_too_many_cards_is_refused_by_their_number() {
    let spec = r#"{"base": "h200x8-nodes4096", "name": "cards", "nics_per_node": 17}"#;
    let error = simulate(&copies(1, 1), &cluster(spec), 16).unwrap_err();
    assert_eq!(error.to_string(), r#"cluster "cards" has 69632 network cards, at most 65536 are simulated"#);
}

/// Every rank puts to every other, with a thread block for each, and each time another number of chunks: no two flows end at
/// one time, and all share links with all.
fn crowd(ranks: u32, each: u64) -> Plan {
    let chunks = u64::from(ranks * ranks) * each;
    let mut builder = PlanBuilder::new("custom", ranks, [chunks, chunks, 0]);
    for from in 0..ranks {
        for (block, to) in (0..ranks).filter(|&to| to != from).enumerate() {
            for turn in 0..each {
                let size = 1 + u64::from(from * ranks + to) + turn;
                builder.on(from, block).put(Memory, to, (Output, 0, size), (Input, 0, size));
            }
        }
    }
    builder.0
}

#[test]
fn what_flows_that_share_links_may_cost_has_a_limit() {
    let one_node = cluster(r#"{"base": "h200x8", "name": "one node", "gpus_per_node": 64}"#);
    let played = |ranks| {
        let plan = crowd(ranks, 4);
        simulate(&plan, &one_node, fitting(&plan, 1 << 20)).map(|done| done.spans.len())
    };
    assert_eq!(played(8), Ok(8 * 7 * 4));
    let error = played(64).unwrap_err();
    assert!(matches!(error, SimulateError::TooShared { .. }), "{error}");
}
