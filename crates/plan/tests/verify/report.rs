//! What a report says, and in which order.

use antiphon_language::{BufferType, Collective, Options as Build, Plan, Program, Result};
use antiphon_plan::verify::{Kind, Options, Report, verify};

fn report(plan: Result<Plan>) -> Report {
    verify(&plan.expect("a plan"), &Options::default())
}

/// In a world of two, thread blocks of rank 0 all copy the same chunk to the same place, which is none of its business.
fn crowd(blocks: u32) -> Result<Plan> {
    let program = Program::new("crowd", &Collective::all_reduce(2, 1), Build::default());
    let rank = program.rank(0)?;
    (0..blocks).try_for_each(|block| {
        rank.copy(rank.output().chunk(0)?, rank.input().chunk(1)?, block)?;
        Ok::<_, antiphon_language::LanguageError>(())
    })?;
    program.plan()
}

#[test]
fn ten_findings_are_shown_and_the_rest_is_counted() {
    let report = report(crowd(12));
    assert!(report.findings.len() > 10, "{report}");
    let text = report.to_string();
    assert_eq!(text.matches("error: ").count(), 10, "{text}");
    let mut last = text.lines().rev();
    assert_eq!(last.next().unwrap(), format!("rejected: {} errors", report.findings.len()));
    assert_eq!(last.next().unwrap(), format!("and {} more findings", report.findings.len() - 10));
    let few = self::report(crowd(1));
    assert!(!few.to_string().contains("more findings"), "{few}");
}

#[test]
fn causes_come_before_what_they_cause() {
    let report = report(crowd(3));
    let names: Vec<_> = report.findings.iter().map(|finding| finding.kind.name()).collect();
    let (races, wrong) =
        names.split_at(names.iter().position(|name| *name == "wrong").expect("a wrong result"));
    assert!(!races.is_empty() && races.iter().all(|name| *name == "race"), "{names:?}");
    assert!(wrong.iter().all(|name| *name == "wrong"), "{names:?}");
}

#[test]
fn places_have_the_operations_name_and_its_line_and_chunks_one_notation() {
    let report = report(crowd(2));
    let text = report.to_string();
    let mut lines = text.lines();
    let race = "error: race: both write, and nothing orders them: chunks 0..1 of rank 0's output";
    assert_eq!(lines.next(), Some(race), "{text}");
    for block in 0..2 {
        let line = lines.next().unwrap();
        let place = format!("    rank 0, thread block {block}, op 0: copy (");
        assert!(line.starts_with(&place) && line.contains("verify/report.rs:1"), "{line}");
    }
    assert_eq!(report.findings[0].operations, ["copy", "copy"]);
}

#[test]
fn one_warning_names_the_unused_scratch_of_all_ranks() {
    let program = Program::new("unused", &Collective::custom("custom", 5, 1, 1), Build::default());
    let build = || -> Result<Plan> {
        for own in 0..5 {
            let rank = program.rank(own)?;
            let scratch = rank.scratch(4)?;
            let used = if own == 4 { 0..2 } else { 0..1 };
            for chunk in used {
                // Rank 4 leaves out a chunk in the middle, which is no warning.
                rank.copy(scratch.chunk(2 * chunk)?, rank.input().chunk(0)?, 0)?;
            }
        }
        program.plan()
    };
    let report = report(build());
    let unused: Vec<_> =
        report.findings.iter().filter(|of| matches!(of.kind, Kind::UnusedScratch { .. })).collect();
    assert_eq!(unused.len(), 1, "{report}");
    let expected = "warning: scratch that nobody uses: chunks 1..4 of ranks 0..4; chunks 3..4 of rank 4";
    assert_eq!(unused[0].to_string(), expected);
    assert_eq!(program.num_chunks(4, BufferType::Scratch).unwrap(), 4);
}
