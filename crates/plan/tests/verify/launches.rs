//! Which plans may be launched back to back, and what the others need a meeting for.

use antiphon_language::library::{Setting, find};
use antiphon_language::{Collective, DataSync, Options as Build, Program, Protocol, Result};
use antiphon_plan::Plan;
use antiphon_plan::verify::{Expectation, Finding, Kind, Memory, Options, Report, verify};

use crate::plans;

fn reports(plan: &Plan) -> [Report; 2] {
    [Memory::Host, Memory::Device].map(|memory| verify(plan, &Options { memory, ..Options::default() }))
}

/// Why a plan that is proved otherwise needs a meeting, in both memories.
fn reasons(plan: &Plan) -> [Finding; 2] {
    reports(plan).map(|report| {
        assert!(report.proved && report.meaning && !report.back_to_back, "{report}");
        let mut warnings =
            report.warnings().filter(|warning| matches!(warning.kind, Kind::NeedsMeeting { .. }));
        let (reason, other) = (warnings.next().cloned(), warnings.next());
        assert!(other.is_none(), "one reason is enough: {report}");
        reason.unwrap_or_else(|| panic!("{report}"))
    })
}

/// Plans that begin with signals that a rank is ready, or whose packets take turns between two halves of the scratch.
#[test]
fn all_but_these_may_be_launched_back_to_back() {
    // Its blocks read the peer's scratch, and tell it nothing behind that.
    let meets = ["pipeline"];
    for (name, plan) in plans::all() {
        for report in reports(&plan) {
            assert_eq!(report.back_to_back, !meets.contains(&name), "{name}: {report}");
            assert_eq!(
                report.to_string().contains("may follow back to back"),
                report.back_to_back,
                "{report}"
            );
            assert_eq!(report.to_json()["back_to_back"], report.back_to_back);
        }
    }
}

/// A launch's packets would overwrite those of the launch before, which their reader may not have read.
#[test]
fn packets_with_one_scratch_need_a_meeting() {
    for ranks in [2, 3, 4] {
        let name = "one-shot-all-reduce";
        let double = find(name).expect("an algorithm").plan(&Setting::new(ranks)).expect("a plan");
        assert!(reports(&double).iter().all(|report| report.back_to_back));
        let single = Plan { use_double_scratch_buffer: false, ..double };
        for finding in reasons(&single) {
            let Kind::NeedsMeeting { why } = &finding.kind else { panic!("{finding}") };
            let of_packets = matches!(&**why, Kind::Race { region, .. } if region.packets);
            assert!(of_packets && finding.places.len() == 2, "{ranks}: {finding}");
            assert!(
                finding.to_string().starts_with("warning: the ranks must meet before each launch"),
                "{finding}"
            );
        }
    }
}

/// A packet of the second step says that its sender has read those of the first step, so a rank that has all of them may send the next.
#[test]
fn packets_in_two_steps_do_without_double_scratch() {
    for ranks in [2, 3, 4] {
        let plan = Plan { use_double_scratch_buffer: false, ..plans::packets(ranks).expect("a plan") };
        assert!(reports(&plan).iter().all(|report| report.back_to_back));
    }
}

/// Rank 0 sends packets, and rank 1 receives; with `back`, rank 1 tells rank 0 behind the packets that it has them.
fn one_way(back: bool, use_double_scratch_buffer: bool) -> Result<Plan> {
    let options = Build { protocol: Protocol::LL, use_double_scratch_buffer, ..Build::default() };
    let program = Program::new("one_way", &Collective::custom("custom", 2, 1, 1), options);
    let (there, here) = (program.memory_channel(1, 0)?, program.memory_channel(0, 1)?);
    let (from, to) = (program.rank(0)?, program.rank(1)?);
    let scratch = to.scratch(2)?;
    there.put_packets(scratch.chunk(0)?, from.input().chunk(0)?, 0)?;
    to.unpack_packets(to.output().chunk(0)?, scratch.chunk(0)?, 0)?;
    if back {
        here.signal(0, DataSync::BEFORE)?;
        there.wait(0, DataSync::AFTER)?;
    }
    program.plan()
}

/// The sender of packets is ahead of their reader by any number of launches if nothing comes back: the third launch would overwrite what the
/// first one sent. Two launches would not show it.
#[test]
fn the_third_launch_has_the_scratch_of_the_first() {
    for double in [false, true] {
        let plan = one_way(false, double).expect("a plan");
        let options = Options { expectation: Some(Expectation::Table(Vec::new())), ..Options::default() };
        let report = verify(&plan, &options);
        let needs = |finding: &Finding| matches!(&finding.kind, Kind::NeedsMeeting { why } if matches!(**why, Kind::Race { .. }));
        assert!(
            report.proved && report.warnings().filter(|finding| needs(finding)).count() == 1,
            "{double}: {report}"
        );
        let report = verify(&one_way(true, double).expect("a plan"), &options);
        assert!(report.proved && report.back_to_back, "{double}: {report}");
    }
}
