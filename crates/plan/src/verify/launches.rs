//! Whether ranks may launch a plan back to back. [The module's page](super#launches-back-to-back) says why races are all that is looked
//! for, and why a few launches are enough.

use super::cells;
use super::finding::{Finding, Kind, Severity};
use super::lower::{self, Budget};
use super::runs::Runs;
use super::{Memory, order, races, schedule};
use crate::extent::Extent;
use crate::plan::Plan;
use crate::resolve::Wiring;

/// Launches of a plan with one scratch.
const WITH_ONE_SCRATCH: u32 = 2;

/// Launches of a plan that takes turns between halves of the scratch.
const WITH_TWO_HALVES: u32 = 3;

/// Why the ranks must meet before each launch of a plan that is right if they do, at one size of its chunks; none if they need not.
pub(super) fn need_meeting(
    plan: &Plan,
    wiring: &Wiring,
    extent: Extent,
    memory: Memory,
    budget: &mut Budget,
) -> Option<Finding> {
    let why = race(plan, wiring, extent, memory, budget).err()?;
    // Accesses of the caller have no place in the plan.
    let places = why.places.into_iter().filter(|&place| plan.op(place).is_some()).collect();
    let kind = Kind::NeedsMeeting { why: Box::new(why.kind) };
    Some(Finding::new(plan, kind, places).in_run(why.served))
}

fn race(
    plan: &Plan,
    wiring: &Wiring,
    extent: Extent,
    memory: Memory,
    budget: &mut Budget,
) -> Result<(), Box<Finding>> {
    let whole = |kind| Box::new(Finding::new(plan, kind, Vec::new()));
    let first = |findings: Vec<Finding>| {
        let mut errors = findings.into_iter().filter(|finding| finding.severity() == Severity::Error);
        errors.next().map_or(Ok(()), |error| Err(Box::new(error)))
    };
    let launches = if plan.use_double_scratch_buffer { WITH_TWO_HALVES } else { WITH_ONE_SCRATCH };
    let mut program = match lower::program(plan, wiring, extent, launches, budget) {
        Ok(program) => program,
        Err(findings) => return first(findings),
    };
    let cells = cells::cut(&mut program, &[]).map_err(whole)?;
    budget.pieces(cells.len() + cells.pieces).map_err(whole)?;
    if cells.mixed() {
        return Err(whole(Kind::SharedScratch));
    }
    let schedule = schedule::run(&program, &cells)?;
    let orders = order::orders(&program, &cells, &schedule, memory).map_err(whole)?;
    let runs = Runs::new(&program, &cells, budget.words);
    let races = races::find(&program, &cells, &schedule, &orders, &runs, &mut budget.pairs, 1);
    budget.words = runs.left();
    first(races.map_err(whole)?)
}
