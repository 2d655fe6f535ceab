//! Proof that a plan does what its collective must do, or a counterexample.

mod cells;
mod clock;
mod expect;
mod finding;
mod lower;
mod order;
mod program;
mod races;
mod schedule;
mod sizes;
mod structure;
mod usage;
mod values;

use std::fmt;

use crate::extent::Extent;
use crate::plan::Plan;
use crate::resolve::Wiring;

pub use expect::{Expectation, Expected, Source};
pub use finding::{Finding, Hazard, Kind, Missing, Region, Severity};
pub use program::Counted;

/// Most findings of one sort.
const FINDINGS: usize = 32;

/// What is to be proved.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// What the outputs must hold; if none, what the plan's collective says.
    pub expectation: Option<Expectation>,
}

/// What was proved, or what stands against it.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Report {
    /// Errors, then warnings.
    pub findings: Vec<Finding>,
    /// Whether there are no errors.
    pub proved: bool,
    /// Whether what the outputs hold was part of it.
    pub meaning: bool,
    /// The sizes of a chunk, in bytes, that stand for all sizes.
    pub chunk_sizes: Vec<u64>,
}

impl Report {
    /// What forbids the plan to run.
    pub fn errors(&self) -> impl Iterator<Item = &Finding> {
        self.findings.iter().filter(|finding| finding.severity() == Severity::Error)
    }

    /// What does not.
    pub fn warnings(&self) -> impl Iterator<Item = &Finding> {
        self.findings.iter().filter(|finding| finding.severity() == Severity::Warning)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for finding in &self.findings {
            writeln!(f, "{finding}")?;
        }
        let (errors, warnings) = (self.errors().count(), self.warnings().count());
        let also = if warnings > 0 { format!(" ({warnings} warnings)") } else { String::new() };
        match (self.proved, self.meaning) {
            (true, true) => {
                write!(f, "proved: in bounds, balanced, free of deadlocks and races, right results{also}")
            }
            (true, false) => {
                write!(
                    f,
                    "proved: in bounds, balanced, free of deadlocks and races; results not judged{also}"
                )
            }
            (false, _) => write!(f, "rejected: {errors} errors{also}"),
        }
    }
}

/// A plan that [`verify`] has proved. Nothing else makes one, so whoever has one may run it.
#[derive(Clone, Debug)]
pub struct VerifiedPlan {
    plan: Plan,
    report: Report,
}

impl VerifiedPlan {
    /// Proves a plan.
    ///
    /// # Errors
    /// The report, if it has errors.
    pub fn new(plan: Plan, options: &Options) -> Result<Self, Box<Report>> {
        let report = verify(&plan, options);
        if report.proved { Ok(VerifiedPlan { plan, report }) } else { Err(Box::new(report)) }
    }

    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// What was proved, and the warnings.
    pub fn report(&self) -> &Report {
        &self.report
    }
}

/// Proves that a plan is right, or says what is wrong.
pub fn verify(plan: &Plan, options: &Options) -> Report {
    let mut verifier = Verifier { plan, findings: Vec::new(), chunk_sizes: Vec::new(), meaning: false };
    if let Err(findings) = verifier.run(options) {
        verifier.findings.extend(findings);
    }
    let Verifier { mut findings, chunk_sizes, meaning, .. } = verifier;
    findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity()));
    let proved = findings.iter().all(|finding| finding.severity() == Severity::Warning);
    Report { findings, proved, meaning, chunk_sizes }
}

struct Verifier<'a> {
    plan: &'a Plan,
    findings: Vec<Finding>,
    chunk_sizes: Vec<u64>,
    meaning: bool,
}

impl Verifier<'_> {
    fn run(&mut self, options: &Options) -> Result<(), Vec<Finding>> {
        let plan = self.plan;
        let whole = |kind| vec![Finding::new(plan, kind, Vec::new())];
        plan.check().map_err(|error| whole(Kind::Form { error: error.to_string() }))?;
        let wiring = Wiring::new(plan);
        stop(structure::check(plan, &wiring, FINDINGS))?;
        self.chunk_sizes = sizes::of(plan).map_err(whole)?;
        let known = match &options.expectation {
            Some(expectation) => Some(expectation.clone()),
            None => Expectation::of(plan).map_err(whole)?,
        };
        if let Some(expectation) = &known {
            expectation.check(plan).map_err(whole)?;
        }
        self.meaning = known.is_some();
        self.findings = usage::unused(plan);
        for &chunk in &self.chunk_sizes.clone() {
            let extent = Extent::of_chunk(chunk, plan.buffer_alignment);
            for finding in at_size(plan, &wiring, extent, known.as_ref())? {
                if !self.findings.contains(&finding) {
                    self.findings.push(finding);
                }
            }
        }
        Ok(())
    }
}

/// Errors end the proof; the rest goes on.
fn stop(findings: Vec<Finding>) -> Result<Vec<Finding>, Vec<Finding>> {
    match findings.iter().any(|finding| finding.severity() == Severity::Error) {
        true => Err(findings),
        false => Ok(findings),
    }
}

/// The warnings at one size of the chunks.
///
/// # Errors
/// All findings, if there are errors.
fn at_size(
    plan: &Plan,
    wiring: &Wiring,
    extent: Extent,
    expectation: Option<&Expectation>,
) -> Result<Vec<Finding>, Vec<Finding>> {
    let whole = |kind| vec![Finding::new(plan, kind, Vec::new())];
    let mut program = lower::program(plan, wiring, extent)?;
    let mut findings = schedule::unbalanced(&program);
    findings.truncate(FINDINGS);
    findings.extend(races::mixed_scratch(&program));
    let cuts = values::cuts(&program, expectation);
    let cells = cells::cut(&mut program, &cuts).map_err(whole)?;
    let schedule = match schedule::run(&program, &cells) {
        Ok(schedule) => schedule,
        Err(deadlock) => {
            findings.push(deadlock);
            return Err(findings);
        }
    };
    let orders = order::orders(&program, &cells, &schedule).map_err(whole)?;
    findings.extend(races::find(&program, &cells, &schedule, &orders, FINDINGS));
    findings.extend(values::check(&program, &cells, &schedule, expectation, FINDINGS).map_err(whole)?);
    stop(findings)
}
