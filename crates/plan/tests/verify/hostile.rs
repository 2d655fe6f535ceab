//! Untrusted plans: an answer in bounded time and memory.

use antiphon_plan::verify::{Kind, Options, Report, verify};
use antiphon_plan::*;

use crate::plans;

fn plan(gpus: &str) -> Plan {
    let text = format!(r#"{{"name": "hostile", "collective": "custom", "gpus": [{gpus}]}}"#);
    Plan::from_json(text.as_bytes()).unwrap_or_else(|error| panic!("{error}"))
}

fn judge(plan: &Plan) -> Report {
    let report = verify(plan, &Options::default());
    assert!(!report.proved, "{report}");
    report
}

/// One rank with one block, which copies.
fn copying(chunks: u64, ops: &str) -> Plan {
    plan(&format!(
        r#"{{"id": 0, "input_chunks": {chunks}, "output_chunks": {chunks}, "scratch_chunks": {chunks}, "channels": [],
            "threadblocks": [{{"id": 0, "ops": [{ops}]}}]}}"#
    ))
}

#[test]
fn buffers_larger_than_any_memory_are_refused() {
    let report = judge(&copying(u64::MAX, ""));
    assert!(matches!(report.findings[0].kind, Kind::NoSize { .. }), "{report}");
    let report = judge(&copying(1 << 50, ""));
    assert!(matches!(report.findings[0].kind, Kind::TooLarge { .. }), "{report}");
    let mut huge = copying(4, "");
    huge.buffer_alignment = 1 << 63;
    judge(&huge);
}

#[test]
fn chunks_beyond_a_buffer_are_named() {
    let op = r#"{"name": "copy", "src_buff": [{"type": "i", "index": 18446744073709551614, "size": 1}],
                 "dst_buff": [{"type": "o", "index": 0, "size": 1}]}"#;
    let report = judge(&copying(2, op));
    let Kind::Bounds { chunks, have, .. } = &report.findings[0].kind else { panic!("{report}") };
    assert_eq!((chunks.start, *have), (u64::MAX - 1, 2));
}

#[test]
fn turns_without_end_are_refused() {
    let op = r#"{"name": "pipeline", "iter_context": {"unit_size": 1, "num_chunks": 1099511627776},
                 "ops": [{"name": "nop"}]}"#;
    let report = judge(&copying(2, op));
    assert!(matches!(report.findings[0].kind, Kind::TooLarge { .. }), "{report}");
}

/// Each copy moves the chunk one further by less than its size: every cut makes another.
#[test]
fn memory_in_ever_smaller_pieces_is_refused_or_judged() {
    let copy = |from: u64, to: u64, size: u64| {
        format!(
            r#"{{"name": "copy", "src_buff": [{{"type": "s", "index": {from}, "size": {size}}}],
                "dst_buff": [{{"type": "s", "index": {to}, "size": {size}}}]}}"#
        )
    };
    let size = 1 << 34;
    let ops = [copy(0, 1, size), copy(0, 3, size)].join(",");
    let report = judge(&copying(1 << 35, &ops));
    assert!(matches!(report.findings[0].kind, Kind::TooLarge { .. }), "{report}");
}

/// Cuts that each copy doubles: what is looked at is bounded, not only what is left.
#[test]
fn cuts_that_many_copies_carry_on_are_refused() {
    let copy = |to: u64| {
        format!(
            r#"{{"name": "copy", "src_buff": [{{"type": "s", "index": 0, "size": 65536}}],
                "dst_buff": [{{"type": "s", "index": {to}, "size": 65536}}]}}"#
        )
    };
    let ops = (0..100).map(|at| copy(1 + at % 2 * 2)).collect::<Vec<_>>().join(",");
    let report = judge(&copying(1 << 18, &ops));
    assert!(matches!(report.findings[0].kind, Kind::TooLarge { .. }), "{report}");
}

/// Every pipeline brings sizes of its own, and at each of them all have turns.
#[test]
fn turns_at_all_sizes_together_are_bounded() {
    let pipeline = |at: u64| {
        format!(
            r#"{{"name": "pipeline", "iter_context": {{"unit_size": {}, "num_chunks": 1}},
                "ops": [{{"name": "nop"}}]}}"#,
            16 << (at % 20)
        )
    };
    let ops = (0..2000).map(pipeline).collect::<Vec<_>>().join(",");
    let report = judge(&copying(2, &ops));
    assert!(matches!(report.findings[0].kind, Kind::TooLarge { .. }), "{report}");
}

/// Each pipeline has turns of its own: there are many sizes, and much to compare at each.
#[test]
fn pipelines_of_many_units_are_refused() {
    let pipeline = |at: u64| {
        format!(
            r#"{{"name": "pipeline", "iter_context": {{"unit_size": {}, "num_chunks": 1}}, "ops": [
                {{"name": "copy", "src_buff": [{{"type": "i", "index": 0, "size": 1}}],
                  "dst_buff": [{{"type": "o", "index": 0, "size": 1}}]}}, {{"name": "nop"}}]}}"#,
            16 * (at + 1)
        )
    };
    for count in [300, 3000] {
        let ops = (0..count).map(pipeline).collect::<Vec<_>>().join(",");
        let report = judge(&copying(1, &ops));
        assert!(matches!(report.findings[0].kind, Kind::TooLarge { .. }), "{report}");
    }
}

#[test]
fn who_waits_for_each_other_is_named() {
    let block = |id: u32, first: u32, second: u32| {
        format!(
            r#"{{"id": {id}, "ops": [{{"name": "sem_acquire", "semaphore_ids": [{first}]}},
                {{"name": "nop"}}, {{"name": "sem_release", "semaphore_ids": [{second}]}}]}}"#
        )
    };
    let blocks: Vec<_> = (0..3).map(|id| block(id, id, (id + 1) % 3)).collect();
    let report = judge(&plan(&format!(
        r#"{{"id": 0, "input_chunks": 0, "output_chunks": 0, "scratch_chunks": 0, "channels": [],
            "semaphores": [{{"init_value": 0}}, {{"init_value": 0}}, {{"init_value": 0}}],
            "threadblocks": [{}]}}"#,
        blocks.join(",")
    )));
    let Kind::Deadlock { waits } = &report.findings[0].kind else { panic!("{report}") };
    assert_eq!((waits.len(), report.findings[0].places.len()), (3, 3), "{report}");
}

/// Any number in a right plan may be any other: there is an answer, and no panic.
#[test]
fn numbers_may_be_anything() {
    let text = plans::hierarchical(2, 2, 1).expect("a plan").to_json();
    let numbers: Vec<_> = text.match_indices(|c: char| c.is_ascii_digit()).collect();
    for (at, digit) in numbers.iter().step_by(7) {
        for other in ["0", "1", "7", "4294967295", "18446744073709551615"] {
            let changed = [&text[..*at], other, &text[at + digit.len()..]].concat();
            if let Ok(plan) = Plan::from_json(changed.as_bytes()) {
                verify(&plan, &Options::default());
            }
        }
    }
}
