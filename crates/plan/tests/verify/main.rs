//! What the verifier proves and what it rejects.

mod hostile;
mod launches;
mod mutants;
mod oracle;
mod orders;
mod plans;
mod random;
mod report;
mod sizes;

use antiphon_plan::verify::{
    Expectation, Expected, Hazard, Kind, Memory, Options, Report, Source, VerifiedPlan, verify,
};
use antiphon_plan::{Plan, Rank, ReduceOp};

#[test]
fn right_plans_are_proved() {
    for (name, plan) in plans::all() {
        let report = verify(&plan, &Options::default());
        assert!(report.proved && report.meaning, "{name}: {report}");
    }
}

/// The plan has 32 ranks with many thread blocks each. With `INSTANCES=12` and --release the test shows how long the verifier takes.
#[test]
fn a_large_plan_is_proved() {
    let instances =
        std::env::var("INSTANCES").map_or(1, |count| count.parse().expect("INSTANCES is a number"));
    let plan = plans::hierarchical(4, 8, instances).expect("a plan");
    let start = std::time::Instant::now();
    let report = verify(&plan, &Options::default());
    println!("{} bytes in {:?}", plan.to_json().len(), start.elapsed());
    assert!(report.proved && report.meaning, "{report}");
}

/// A channel that carries data one way needs none back; one that carries signals does.
#[test]
fn only_signals_need_a_channel_back() {
    let mut plan = plans::all_gather(2).expect("a plan");
    let one_way = |plan: &mut Plan, keep: &[&str]| {
        plan.gpus[1].threadblocks[0].ops.clear();
        plan.gpus[1].threadblocks[0].channels.clear();
        plan.gpus[1].channels.clear();
        plan.gpus[0].threadblocks[0].ops.retain(|op| keep.contains(&op.kind.name()));
        verify(plan, &Options { expectation: Some(Expectation::Table(Vec::new())), ..Options::default() })
    };
    let kinds = |report: &Report| report.errors().map(|error| error.kind.name()).collect::<Vec<_>>();
    assert_eq!(kinds(&one_way(&mut plan.clone(), &["nop", "put", "signal"])), ["no_counterpart"]);
    // No block waits for it, so it may come too late.
    assert_eq!(kinds(&one_way(&mut plan, &["nop", "put"])), ["late"]);
}

/// The caller may give the expectation, for plans whose collective is unknown or another one.
#[test]
fn a_table_takes_the_place_of_the_collective() {
    let plan = plans::all_gather(2).expect("a plan");
    let row = |from| Expected {
        rank: Rank(1),
        index: 0,
        size: 1,
        from: vec![Source { rank: Rank(from), index: 0 }],
        op: ReduceOp::Sum,
    };
    let judge = |from| {
        verify(
            &plan,
            &Options { expectation: Some(Expectation::Table(vec![row(from)])), ..Options::default() },
        )
    };
    assert!(judge(0).proved);
    let report = judge(1);
    let text = report.to_string();
    assert!(
        text.contains("must hold rank 1's input (chunk 0), and holds rank 0's input (chunk 0)"),
        "{text}"
    );
}

/// Rank 1's output holds rank 0's input, chunk by chunk.
fn handed_over() -> Options {
    let row = |index| Expected {
        rank: Rank(1),
        index,
        size: 1,
        from: vec![Source { rank: Rank(0), index }],
        op: ReduceOp::Sum,
    };
    Options { expectation: Some(Expectation::Table((0..2).map(row).collect())), ..Options::default() }
}

fn races(report: &Report) -> Vec<Hazard> {
    let hazard = |kind: &Kind| match kind {
        Kind::Race { hazard, .. } => Some(*hazard),
        _ => None,
    };
    report.errors().filter_map(|error| hazard(&error.kind)).collect()
}

/// A relaxed signal or wait does not show what was written before it: the reader may find what was there before.
#[test]
fn data_behind_a_relaxed_signal_need_not_be_seen() {
    let both = [[true, false], [false, true], [true, true]]
        .map(|relaxed| [(relaxed, Memory::Host), (relaxed, Memory::Device)]);
    for (relaxed, memory) in both.into_iter().flatten() {
        let plan = plans::hand_over(relaxed, Some([true, true])).expect("a plan");
        let report = verify(&plan, &Options { memory, ..handed_over() });
        let races = races(&report);
        assert!(!races.is_empty() && races.iter().all(|race| *race == Hazard::ReadAfterWrite), "{report}");
        assert_eq!(report.errors().count(), races.len(), "{report}");
    }
    let plan = plans::hand_over([false, false], Some([true, true])).expect("a plan");
    let report = verify(&plan, &handed_over());
    assert!(report.proved && report.meaning, "{report}");
}

/// What was read before a relaxed signal may be overwritten behind it: reading leaves nothing to be seen. But not without
/// any signal.
#[test]
fn a_relaxed_signal_is_enough_to_overwrite() {
    for relaxed in [[true, true], [true, false], [false, true], [false, false]] {
        let plan = plans::hand_over([false, false], Some(relaxed)).expect("a plan");
        let report = verify(&plan, &handed_over());
        assert!(report.proved && report.meaning, "{relaxed:?}: {report}");
    }
    let plan = plans::hand_over([false, false], None).expect("a plan");
    assert!(!races(&verify(&plan, &handed_over())).is_empty());
}

/// A packet tells on a host that what its writer stored before is there. In device memory it tells of nothing but itself; a signal does.
#[test]
fn what_only_a_packet_announces_is_an_error_in_device_memory() {
    for (ranks, overwrites) in [2, 3, 4].into_iter().flat_map(|ranks| [(ranks, false), (ranks, true)]) {
        let row = |rank: u32, index: u64| {
            let from = Source { rank: Rank((rank + ranks - 1) % ranks), index };
            let index = u64::from(from.rank.0) * 2 + index;
            Expected { rank: Rank(rank), index, size: 1, from: vec![from], op: ReduceOp::Sum }
        };
        // What came as a plain chunk is in the output, unless it is overwritten.
        let first = u64::from(overwrites);
        let rows = || (0..ranks).flat_map(|rank| (first..2).map(move |index| row(rank, index))).collect();
        let options = |memory| Options { expectation: Some(Expectation::Table(rows())), memory };
        let plan = |signal| plans::announced(ranks, signal, overwrites).expect("a plan");
        for (memory, signal) in [(Memory::Host, false), (Memory::Host, true), (Memory::Device, true)] {
            let proved = VerifiedPlan::new(plan(signal), &options(memory));
            assert_eq!(
                proved.unwrap_or_else(|report| panic!("{ranks}, {memory:?}: {report}")).memory(),
                memory
            );
        }
        let report = verify(&plan(false), &options(Memory::Device));
        let expected = if overwrites { Hazard::WriteAfterWrite } else { Hazard::ReadAfterWrite };
        let announced =
            |kind: &Kind| matches!(kind, Kind::OnlyAnnounced { hazard, .. } if *hazard == expected);
        assert_eq!(report.errors().count(), ranks as usize, "{report}");
        for error in report.errors() {
            let [first, second] = error.places[..] else { panic!("{report}") };
            assert!(announced(&error.kind) && first.rank != second.rank, "{ranks}: {report}");
        }
    }
}

/// Which right plans are right in device memory, too.
#[test]
fn plans_whose_packets_announce_only_themselves_are_proved_for_device_memory() {
    for (name, plan) in plans::all() {
        let report = verify(&plan, &Options { memory: Memory::Device, ..Options::default() });
        assert!(report.proved && report.meaning, "{name}: {report}");
    }
}
