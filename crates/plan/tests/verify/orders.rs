//! Plans whose runs differ: semaphores that several thread blocks take from, scratch that is packets and plain data.

use antiphon_plan::verify::{Expectation, Expected, Finding, Kind, Mistake, Options, Report, Source, verify};
use antiphon_plan::{Plan, Rank, ReduceOp};

/// One rank with semaphores that begin with these counts and blocks that do this: a word is an operation and its numbers.
fn plan(semaphores: &[i64], blocks: &[&str]) -> Plan {
    let semaphores: Vec<_> = semaphores.iter().map(|count| format!(r#"{{"init_value": {count}}}"#)).collect();
    let blocks: Vec<_> = blocks
        .iter()
        .enumerate()
        .map(|(id, ops)| {
            let ops: Vec<_> = ops.split_whitespace().map(op).collect();
            format!(r#"{{"id": {id}, "ops": [{}]}}"#, ops.join(","))
        })
        .collect();
    let text = format!(
        r#"{{"name": "orders", "collective": "custom", "protocol": "LL", "gpus": [{{"id": 0, "input_chunks": 4,
            "output_chunks": 4, "scratch_chunks": 4, "channels": [], "semaphores": [{}], "threadblocks": [{}]}}]}}"#,
        semaphores.join(","),
        blocks.join(",")
    );
    Plan::from_json(text.as_bytes()).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// `-` is a meeting of the threads; `take:0:1` and `give:0`; `copy:i0:o1`, `pack:i0:s0`, `unpack:s0:o0`, `add:i0:o0`.
fn op(word: &str) -> String {
    let mut parts = word.split(':');
    let name = parts.next().expect("a name");
    let parts: Vec<_> = parts.collect();
    let chunk = |at: usize| {
        let (buffer, index) = parts[at].split_at(1);
        format!(r#"{{"type": "{buffer}", "index": {index}, "size": 1}}"#)
    };
    let copy = |name: &str| {
        format!(r#"{{"name": "{name}", "src_buff": [{}], "dst_buff": [{}]}}"#, chunk(0), chunk(1))
    };
    let count = |name: &str| format!(r#"{{"name": "{name}", "semaphore_ids": [{}]}}"#, parts.join(","));
    match name {
        "-" => r#"{"name": "nop"}"#.into(),
        "take" => count("sem_acquire"),
        "give" => count("sem_release"),
        "copy" => copy("copy"),
        "pack" => copy("cpkt"),
        "unpack" => copy("upkt"),
        "add" => format!(
            r#"{{"name": "re", "src_buff": [{0}, {1}], "dst_buff": [{0}], "reduce_op": "sum"}}"#,
            chunk(1),
            chunk(0)
        ),
        other => panic!("{other}"),
    }
}

fn judge(semaphores: &[i64], blocks: &[&str]) -> Report {
    verify(&plan(semaphores, blocks), &Options::default())
}

fn proved(semaphores: &[i64], blocks: &[&str]) {
    let report = judge(semaphores, blocks);
    assert!(report.proved, "{report}");
}

/// The only error.
fn error(report: &Report) -> &Finding {
    let mut errors = report.errors();
    let first = errors.next().unwrap_or_else(|| panic!("{report}"));
    assert!(errors.next().is_none(), "{report}");
    first
}

/// The blocks that took, in order, in the run that went wrong.
fn served(finding: &Finding) -> Vec<u32> {
    finding.served.iter().map(|served| served.block.0).collect()
}

/// Chunk 0 of the output is the sum of these chunks of the input.
fn sum_of(chunks: &[u64]) -> Options {
    let from = chunks.iter().map(|&index| Source { rank: Rank(0), index }).collect();
    let row = Expected { rank: Rank(0), index: 0, size: 1, from, op: ReduceOp::Sum };
    Options { expectation: Some(Expectation::Table(vec![row])), ..Options::default() }
}

/// Each of the blocks does something with the output while it has the semaphore, and then says so.
fn in_turn(what: [&str; 2]) -> [String; 3] {
    let [first, second] = what.map(|op| format!("take:0 - {op} - give:0 give:1"));
    ["copy:i0:o0 - give:0 take:1 take:1 - take:0".into(), first, second]
}

#[test]
fn a_sum_is_the_same_in_any_order() {
    let blocks = in_turn(["add:i1:o0", "add:i2:o0"]);
    let blocks = blocks.each_ref().map(String::as_str);
    let report = verify(&plan(&[0, 0], &blocks), &sum_of(&[0, 1, 2]));
    assert!(report.proved, "{report}");
    let report = verify(&plan(&[0, 0], &blocks), &sum_of(&[0, 1]));
    assert!(matches!(error(&report).kind, Kind::Wrong { .. }), "{report}");
}

#[test]
fn results_that_depend_on_the_order_are_found_with_the_order() {
    let blocks = in_turn(["copy:i1:o0", "copy:i2:o0"]);
    let blocks = blocks.each_ref().map(String::as_str);
    for (expected, wrong) in [(2, [2, 1]), (1, [1, 2])] {
        let report = verify(&plan(&[0, 0], &blocks), &sum_of(&[expected]));
        let finding = error(&report);
        assert!(matches!(finding.kind, Kind::Wrong { .. }), "{report}");
        assert!(served(finding).starts_with(&wrong), "{report}");
    }
    let report = verify(&plan(&[0, 0], &blocks), &sum_of(&[2]));
    let order = "if these take first, in this order: thread block 2 of rank 0 from semaphore 0 of rank 0, \
                 thread block 1 of rank 0 from semaphore 0 of rank 0";
    assert!(report.to_string().contains(order), "{report}");
}

/// What is given once for each piece says of one that it is there, and not of two.
#[test]
fn who_comes_first_may_find_too_little() {
    let producer = "copy:i0:s0 - give:0 - copy:i1:s1 - give:0";
    proved(&[0], &[producer, "take:0 - copy:s0:o0", "take:0 - copy:s0:o1"]);
    let report = judge(&[0], &[producer, "take:0 - copy:s0:o0", "take:0 - copy:s1:o1"]);
    let race: Vec<_> = report.errors().filter(|error| matches!(error.kind, Kind::Race { .. })).collect();
    assert!(race.len() == 1 && served(race[0]) == [2], "{report}");
}

/// Packets tell what their writer knew; which of two writers is the first depends on the run.
#[test]
fn who_packs_first_may_be_another() {
    let pack = "take:0 - pack:i0:s0 - take:1 - give:0";
    let reader = "unpack:s0:o0 - give:1 - copy:o1:o2 - give:1";
    let copied = format!("copy:i0:o1 {pack}");
    proved(&[1, 0], &[&copied, &format!("copy:i0:o3 {pack}"), &reader.replace("copy:o1:o2", "copy:i0:o2")]);
    let report = judge(&[1, 0], &[&copied, pack, reader]);
    let finding = error(&report);
    assert!(matches!(finding.kind, Kind::Race { .. }) && served(finding)[0] == 1, "{report}");
}

#[test]
fn who_wants_both_in_another_order_may_wait_for_ever() {
    let both = |first: &str, second: &str| format!("{first} - {second} - give:0:1");
    let same = both("take:0", "take:1");
    proved(&[1, 1], &[&same, &same, &same]);
    let report = judge(&[1, 1], &[&same, &both("take:1", "take:0")]);
    let finding = error(&report);
    assert!(matches!(finding.kind, Kind::Deadlock { .. }), "{report}");
    assert_eq!((served(finding), finding.places.len()), (vec![0, 1], 2), "{report}");
}

/// Threads take from the semaphores of one operation, and of those between two meetings, in any order.
#[test]
fn threads_that_take_side_by_side_may_wait_for_ever() {
    for take in ["take:0:1", "take:0 take:1"] {
        let block = format!("{take} - give:0 - give:1");
        let report = judge(&[1, 1], &[&block, &block]);
        let finding = error(&report);
        assert!(matches!(finding.kind, Kind::Deadlock { .. }), "{report}");
        assert_eq!(served(finding).len(), 2, "{report}");
        proved(&[2, 2], &[&block, &block]);
    }
}

/// A block of one thread gives back only what it has taken.
#[test]
fn what_many_threads_give_first_one_may_wait_for_ever() {
    for [first, meets] in [["take:0:1 -", ""], ["take:1 - take:0 -", ""], ["take:0:1 -", "-"]] {
        let report = judge(&[0, 1], &[first, &format!("take:1 {meets} give:1 - give:0 - give:1")]);
        let finding = error(&report);
        assert!(matches!(finding.kind, Kind::Deadlock { .. }), "{report}");
        assert_eq!(served(finding), [0], "{report}");
    }
    proved(&[0, 1], &["take:0 - take:1 -", "take:1 give:1 - give:0 - give:1"]);
}

#[test]
fn more_orders_than_can_be_tried_are_refused() {
    let block = "take:0 - give:0 - ".repeat(8);
    let report = judge(&[1], &[&*block; 8]);
    let Kind::TooLarge { what, .. } = error(&report).kind else { panic!("{report}") };
    assert!(what.contains("took from a counter before others"), "{report}");
    // There is enough for all blocks: none is in another's way.
    proved(&[64], &[&*block; 8]);
}

fn mistake(blocks: &[&str]) -> (Mistake, Vec<(u32, u32)>) {
    let report = judge(&[0], blocks);
    let finding = error(&report);
    let Kind::MixedScratch { mistake, .. } = finding.kind else { panic!("{report}") };
    (mistake, finding.places.iter().map(|place| (place.threadblock.0, place.op)).collect())
}

/// Packets of chunk 0 lie in the bytes of the chunks 0 and 1 of plain data.
#[test]
fn scratch_may_be_packets_and_plain_data_in_turn() {
    // The packets are there when the threads begin to look, whatever lay there.
    proved(&[], &["pack:i0:s0 - unpack:s0:o0 - copy:i1:s1 - copy:s1:o1"]);
    proved(&[], &["copy:i1:s1 - copy:s1:o1 - pack:i0:s0 - unpack:s0:o0"]);
    proved(&[0], &["copy:i1:s1 - pack:i0:s0 - give:0", "take:0 - unpack:s0:o0"]);
    // They are waited for, and packets of the launch before lie there.
    proved(&[0], &["pack:i0:s0 take:0 - copy:i1:s1 - pack:i0:s0", "unpack:s0:o0 - give:0"]);
    // No block reads them.
    proved(&[], &["pack:i0:s0 - copy:i1:s0", "copy:i1:s2"]);
    // Whether data of a launch that others have not ended may be in the way is not looked at.
    let report = judge(&[], &["pack:i0:s0 - copy:i1:s0", "copy:i1:s2"]);
    let meets = |finding: &Finding| matches!(&finding.kind, Kind::NeedsMeeting { why } if **why == Kind::SharedScratch);
    assert!(!report.back_to_back && report.warnings().any(meets), "{report}");
}

#[test]
fn packets_and_plain_data_at_the_same_time_race() {
    for block in ["copy:i1:s1", "copy:i1:s0 -", "- copy:i1:s1"] {
        let report = judge(&[], &["pack:i0:s0", block]);
        assert!(matches!(error(&report).kind, Kind::Race { .. }), "{report}");
    }
    // A block that waits for packets reads memory that is being written.
    let report = judge(&[0], &["copy:i1:s1 - pack:i0:s0", "unpack:s0:o0"]);
    assert!(report.errors().any(|error| matches!(error.kind, Kind::Race { .. })), "{report}");
    // Packets are farther apart than what they carry.
    let report = judge(&[], &["copy:i0:s1 - pack:s1:s0"]);
    assert!(matches!(error(&report).kind, Kind::Race { .. }), "{report}");
}

#[test]
fn packets_read_as_plain_data_are_flags() {
    let found = mistake(&["copy:i1:s1 - pack:i0:s0 - copy:s1:o0"]);
    assert_eq!(found, (Mistake::PacketsForData, vec![(0, 4), (0, 2)]));
    assert_eq!(mistake(&["pack:i0:s0 - copy:s0:o0"]).0, Mistake::PacketsForData);
}

#[test]
fn plain_data_may_equal_a_flag() {
    // The data lie there when the other block begins to look.
    let found = mistake(&["copy:i1:s1 - give:0 - pack:i0:s0", "take:0 - unpack:s0:o0"]);
    assert_eq!(found, (Mistake::DataForPackets, vec![(1, 2), (0, 0)]));
    // They have taken the packets' place.
    let found = mistake(&["pack:i0:s0 - copy:i1:s1 - unpack:s0:o0"]);
    assert_eq!(found, (Mistake::DataForPackets, vec![(0, 4), (0, 2)]));
}

#[test]
fn plain_data_of_the_launch_before_may_equal_a_flag() {
    let found = mistake(&["pack:i0:s0", "unpack:s0:o0 - copy:i1:s1"]);
    assert_eq!(found, (Mistake::LaunchBefore, vec![(1, 0), (1, 2)]));
}

/// Only if the second block comes first does its data lie in the way of the packets.
#[test]
fn plain_data_in_the_way_of_packets_in_one_order_only() {
    let (plain, packets) = ("take:0 - copy:i0:s2 - give:0 give:1", "take:0 - pack:i1:s1 - give:0 give:2");
    let report = judge(&[1, 0, 0], &[plain, packets, "take:1 take:2 - unpack:s1:o0"]);
    let finding = error(&report);
    assert!(matches!(finding.kind, Kind::MixedScratch { mistake: Mistake::DataForPackets, .. }), "{report}");
    assert_eq!(served(finding), [1], "{report}");
    proved(&[1, 0, 0], &[plain, &format!("take:1 - {packets}"), "take:2 - unpack:s1:o0"]);
}
