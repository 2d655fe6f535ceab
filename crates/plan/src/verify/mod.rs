//! The proof that a plan implements its collective, or a counterexample.
//!
//! [`verify`] always decides: a plan is proved, or there is a counterexample. A counterexample names the operations that take
//! part. Where the order in which blocks take from a counter matters, it names this order too ([`Finding::served`]). Only a
//! plan that is too large for the bounds on time and memory is rejected without a counterexample, and the error says so
//! ([`Kind::TooLarge`]).
//!
//! A proof covers every size of message that the plan supports, if a few sizes can represent all. Where pipelines do not
//! advance together, more iterations may cause what fewer do not. Then the proof covers every size up to some chunk, and the
//! report states this chunk ([`Report::largest_chunk`]); an executor divides larger messages into parts.
//!
//! # What is proved
//!
//! * **Form**: every object that an operation names exists; chunk ranges lie in their buffers; the ranges of one operation are
//!   equally long; packets are in scratch; channels lead to the ranks of the buffers and have a counterpart; all blocks of a
//!   barrier reach it.
//! * **Balance**: a launch takes from each channel and semaphore as much as it adds, so the next launch finds the same state.
//! * **No deadlock**: every run ends.
//! * **No race**: of two accesses to the same bytes of which one writes, one happens before the other, in every run. All
//!   accesses to a rank's input and output happen before the rank has ended.
//! * **Values**: all bytes are written before they are read, and the outputs hold the results of the collective
//!   ([`Expectation`]), with each contribution once (for minima and maxima: at least once).
//!
//! # The memory model
//!
//! A plan must be right for any number of threads in a thread block, and any assignment of work to them.
//!
//! * *With one thread*, operations are done one after the other: all steps that can deadlock are done so.
//! * *With many threads*, the operations between two synchronisations of the block's threads (`nop`, `barrier`) are done in any
//!   order and at the same time. Two of them that access the same bytes race, even if a kernel happens to give each byte to
//!   the same thread in both.
//! * A **signal** or release publishes the operations before the last synchronisation of its block's threads. A **wait** or
//!   acquire makes them visible to the operations after the next synchronisation. Counts do not distinguish their signals: if
//!   several blocks add to one count, a block that takes from it knows only the additions that must have happened in any order.
//!   If several blocks take from one count, any of them may be first, and the counts of one operation are taken in any order.
//! * **Relaxed** signals and waits order execution, but not data: bytes that were read before the signal may be overwritten
//!   after the wait, but writes before the signal may be invisible.
//! * A **packet** is read after it has arrived: the reader of some bytes knows what their writer knew, and that the writer has
//!   finished with these bytes, in its other buffers too. Packets belong to one launch: those of an earlier launch are not
//!   mistaken for new ones. Packets lie in scratch in twice the bytes of their data, at twice the offset.
//!   In **device memory** ([`Memory::Device`]) a packet says less. PTX makes what a thread wrote visible to another only by a release
//!   and an acquire, and a packet is a relaxed store. So the reader of a packet knows its bytes and nothing else: it orders execution as
//!   a relaxed signal does (what was read before it may be overwritten), but data that its writer stored before, elsewhere or in the same
//!   operation, need not be there. A block to which the reader then signals knows of the packet, too. Plain bytes that are
//!   read, or overwritten, where only packets say that they were written are an error ([`Kind::OnlyAnnounced`]).
//! * **Packets and plain data** may share bytes of scratch, one after the other. A reader must find in such bytes the kind that
//!   it reads. Plain data may equal any flag, so a reader must not begin to wait for packets while plain data lie there, of this
//!   launch or of the one before, unless the packets are known to arrive first.
//! * A **port** does the operations that its block pushes, concurrently with the block and in order. They happen between the
//!   last synchronisation of the block's threads and a flush (for the block) or a later signal through the same channel (for
//!   the block that waits for it). The chunks of one operation are in no order.
//! * In place, input and output are the same memory. The input of an all-gather is the rank's part of the output; the output of
//!   a reduce-scatter is the rank's part of the input.
//!
//! # Duties of the caller
//!
//! The proof covers launches before each of which all ranks meet. A rank has ended when its blocks have ended and its ports have done all pushed operations. No
//! rank may begin a launch before all ranks have ended the one before and own their buffers: the caller synchronises the ranks
//! before each call, unless the plan is proved for [launches back to back](self#launches-back-to-back). A plan that needs this for the
//! caller's buffers at the latest gets a warning ([`Kind::Unstarted`]). Scratch has as many bytes for a chunk as the other buffers, also
//! where plans share it. Launches of other sizes or plans leave no plain data at places where a launch waits for packets.
//!
//! # Launches back to back
//!
//! Some plans are also right if each rank launches again as soon as its own launch has ended, using its tensors in between
//! ([`Report::back_to_back`]). The others get a warning that says what would be wrong ([`Kind::NeedsMeeting`]).
//!
//! For this, a few launches in a row are one program. Between two of them a step joins a rank's blocks and ports, and accesses its tensors
//! as the caller may: it reads the output, and overwrites both. What a rank knew when it began a launch is published by all signals of the
//! launch, the relaxed ones too. If the plan has double scratch, every second launch has the other half.
//! The plan may be launched back to back if no two accesses of that program race. Deadlocks and values need not be looked at again, since
//! **nothing of a launch depends on a later one**:
//!
//! * All blocks that add to a counter are of one rank, and so are all that take from it. A launch takes as much as it adds. So what a
//!   rank adds in a later launch comes when it has added all of this one, which is enough for all takes of this one: more changes
//!   nothing.
//! * Barriers and semaphores are of one rank, whose launches follow each other.
//! * A packet has the number of its launch, and is awaited from the same launch. That another launch overwrites it before it is read is
//!   a race.
//!
//! So every launch ends, as it would behind a meeting. And its reads find the same: the write of a later launch does not happen before
//! a read, so without races it happens behind; and that of an earlier launch happens before the write of the read's own launch.
//! Where packets and plain data share bytes of scratch, more would have to be looked at: such plans get the warning.
//!
//! **Two launches are enough with one scratch, and three with two halves.** What orders the accesses of two launches is the same wherever
//! they stand in the row, since each launch finds the counters as the one before did. Let `a` in a launch and `b` in a later one access the
//! same bytes. If no launch between them has these bytes, the two stand next to each other, or next but one for a half of the scratch, and are
//! among those that were looked at. Else the first launch between them that has these bytes contains `c`, the counterpart of `b`:
//! the same access of the same rank. Then `a` happens before `c`, as was looked at, and `c` before `b`, since the launches of a rank
//! follow each other. The same holds for accesses of the caller.
//!
//! # Method
//!
//! The plan is unrolled at a few sizes of a chunk that represent all sizes, or all in a range (pipelines iteration by
//! iteration). Memory is divided into cells that every operation accesses as a whole, so their number depends on the plan and
//! not on the size. One run represents all, because an awaited state lasts until it is taken; only where several blocks take
//! from one counter, all orders are tried. Vector clocks of thread blocks, ports and packets along the run order the accesses in
//! all runs, and each cell has the set of its contributions. Clocks are incomplete where several blocks add to a counter or
//! take from it: two accesses that they do not order are searched for in the runs, and are a race if some run has it. Accesses
//! that only relaxed waits order are searched for in runs that skip these waits.
//!
//! ```
//! use antiphon_plan::{Plan, verify::{Options, verify}};
//!
//! let plan = Plan::from_json(br#"{"name": "lost", "collective": "custom", "gpus": [{"id": 0, "input_chunks": 1,
//!     "output_chunks": 1, "scratch_chunks": 0, "channels": [], "semaphores": [{"init_value": 0}],
//!     "threadblocks": [{"id": 0, "ops": [{"name": "sem_acquire", "semaphore_ids": [0]}]}]}]}"#)?;
//! let report = verify(&plan, &Options::default());
//! assert!(!report.proved);
//! assert!(report.to_string().contains("deadlock: each waits for ever, for a release of semaphore 0 of rank 0"));
//! # Ok::<(), antiphon_plan::PlanError>(())
//! ```

mod cells;
mod clock;
mod counters;
mod data;
mod expect;
mod finding;
mod launches;
mod lower;
mod mistaken_packets;
mod order;
mod pipelines;
mod program;
mod races;
mod runs;
mod schedule;
mod sizes;
mod structure;
mod text;
mod usage;
mod values;

use std::fmt;

use crate::error::PlanError;
use crate::extent::Extent;
use crate::plan::Plan;
use crate::resolve::Wiring;

pub use expect::{Expectation, Expected, Source};
pub use finding::{Finding, Hazard, Kind, Missing, Mistake, Region, Served, Severity};
use lower::Budget;
pub use program::Counted;
use runs::Runs;
use sizes::Gap;

/// Most findings of one sort.
const FINDINGS: usize = 32;

/// Most findings that a report shows as text.
const SHOWN: usize = 10;

/// The memory in which a plan runs; see [the memory model](self#the-memory-model).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Memory {
    /// That of a host. A packet says that all its writer did before is done.
    #[default]
    Host,
    /// That of GPUs. A packet orders execution as a relaxed signal does, and carries nothing but its own data. What is proved for it
    /// holds on a host, too.
    Device,
}

/// The options of a proof.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// The required content of the outputs; `None` stands for that of the plan's collective.
    pub expectation: Option<Expectation>,
    /// The memory that the plan is proved for.
    pub memory: Memory,
}

/// The proof, or the reasons against it.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Report {
    /// Errors, then warnings; of each, what can be the cause of others comes first.
    pub findings: Vec<Finding>,
    /// Whether there are no errors.
    pub proved: bool,
    /// Whether what the outputs hold was part of it.
    pub meaning: bool,
    /// The sizes of a chunk, in bytes, that were looked at: they stand for all, up to the largest.
    pub chunk_sizes: Vec<u64>,
    /// The largest chunk, in bytes, for which the plan is proved; if none, it is for every message that it serves.
    pub largest_chunk: Option<u64>,
    /// Whether every output is one rank's input, or inputs that one step reduces in the order of the ranks: all such plans of a collective
    /// have equal bits, those of Antiphon's own operations. Not known, and so false, where `meaning` is.
    pub in_rank_order: bool,
    /// Whether the plan is also right if its ranks do not meet between launches: each launches again as soon as its own launch has ended,
    /// and uses its tensors in between. A proved plan of which this is not known has the warning [`Kind::NeedsMeeting`].
    pub back_to_back: bool,
}

impl Report {
    /// The findings that reject the plan.
    pub fn errors(&self) -> impl Iterator<Item = &Finding> {
        self.findings.iter().filter(|finding| finding.severity() == Severity::Error)
    }

    /// The findings that do not reject it.
    pub fn warnings(&self) -> impl Iterator<Item = &Finding> {
        self.findings.iter().filter(|finding| finding.severity() == Severity::Warning)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for finding in self.findings.iter().take(SHOWN) {
            writeln!(f, "{finding}")?;
        }
        if self.findings.len() > SHOWN {
            writeln!(f, "and {} more findings", self.findings.len() - SHOWN)?;
        }
        let (errors, warnings) = (self.errors().count(), self.warnings().count());
        let also = match warnings {
            0 => String::new(),
            1 => " (1 warning)".into(),
            _ => format!(" ({warnings} warnings)"),
        };
        if !self.proved {
            return write!(f, "rejected: {errors} {}{also}", if errors == 1 { "error" } else { "errors" });
        }
        let range =
            self.largest_chunk.map(|chunk| format!(" for chunks of up to {chunk} bytes")).unwrap_or_default();
        let results = if self.meaning { ", right results" } else { "; results not judged" };
        let launches = if self.back_to_back { "; launches may follow back to back" } else { "" };
        write!(f, "proved{range}: in bounds, balanced, free of deadlocks and races{results}{launches}{also}")
    }
}

/// A plan that [`verify`] has proved. No other function makes one, so an executor may run it.
#[derive(Clone, Debug)]
pub struct VerifiedPlan {
    plan: Plan,
    report: Report,
    memory: Memory,
}

impl VerifiedPlan {
    /// Proves a plan.
    ///
    /// # Errors
    /// The report, if it has errors.
    pub fn new(plan: Plan, options: &Options) -> Result<Self, Box<Report>> {
        let report = verify(&plan, options);
        if report.proved {
            Ok(VerifiedPlan { plan, report, memory: options.memory })
        } else {
            Err(Box::new(report))
        }
    }

    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The report of the proof, with its warnings.
    pub fn report(&self) -> &Report {
        &self.report
    }

    /// The memory that it was proved for.
    pub fn memory(&self) -> Memory {
        self.memory
    }
}

/// Proves that a plan is right, or reports what is wrong.
pub fn verify(plan: &Plan, options: &Options) -> Report {
    Verifier::new(plan, options.memory).report(|verifier| verifier.run(options))
}

/// Proves that a plan is right at one size of a chunk, in bytes, or reports what is wrong there.
///
/// For tests that a proof at the sizes that [`verify`] chooses covers all sizes.
#[doc(hidden)]
pub fn verify_at(plan: &Plan, options: &Options, chunk: u64) -> Report {
    Verifier::new(plan, options.memory).report(|verifier| {
        let (wiring, expectation) = verifier.checked(options)?;
        let budget = &mut Budget::new();
        verifier.prove(&wiring, expectation.as_ref(), &[chunk], budget)?;
        verifier.prove_back_to_back(&wiring, budget);
        Ok(())
    })
}

struct Verifier<'a> {
    plan: &'a Plan,
    memory: Memory,
    findings: Vec<Finding>,
    chunk_sizes: Vec<u64>,
    largest_chunk: Option<u64>,
    meaning: bool,
    in_rank_order: bool,
    back_to_back: bool,
}

impl<'a> Verifier<'a> {
    fn new(plan: &'a Plan, memory: Memory) -> Self {
        let (findings, chunk_sizes) = (Vec::new(), Vec::new());
        Verifier {
            plan,
            memory,
            findings,
            chunk_sizes,
            largest_chunk: None,
            meaning: false,
            in_rank_order: true,
            back_to_back: false,
        }
    }

    fn report(mut self, run: impl FnOnce(&mut Self) -> Result<(), Vec<Finding>>) -> Report {
        if let Err(findings) = run(&mut self) {
            self.findings.extend(findings);
        }
        let Verifier {
            mut findings, chunk_sizes, largest_chunk, meaning, in_rank_order, back_to_back, ..
        } = self;
        findings.sort_by_key(|finding| (std::cmp::Reverse(finding.severity()), finding.kind.depth()));
        let proved = findings.iter().all(|finding| finding.severity() == Severity::Warning);
        Report {
            findings,
            proved,
            meaning,
            chunk_sizes,
            largest_chunk,
            in_rank_order: in_rank_order && proved,
            back_to_back: back_to_back && proved,
        }
    }

    fn run(&mut self, options: &Options) -> Result<(), Vec<Finding>> {
        let plan = self.plan;
        let whole = |kind| vec![Finding::new(plan, kind, Vec::new())];
        let (wiring, expectation) = self.checked(options)?;
        let mut budget = Budget::new();
        let gap = match sizes::gap(plan).map_err(whole)? {
            None => pipelines::gap(plan, &wiring, &mut budget)?,
            gap => gap,
        };
        match gap {
            None => {
                let sizes = sizes::of(plan).map_err(whole)?;
                self.prove(&wiring, expectation.as_ref(), &sizes, &mut budget)?;
            }
            Some(gap) => self.prove_range(&wiring, expectation.as_ref(), gap, &mut budget)?,
        }
        self.prove_back_to_back(&wiring, &mut budget);
        Ok(())
    }

    /// Looks at launches back to back, at the sizes for which the plan is proved, with what is left of the budget.
    fn prove_back_to_back(&mut self, wiring: &Wiring, budget: &mut Budget) {
        let extent = |&chunk: &u64| Extent::of_chunk(chunk, self.plan.buffer_alignment);
        let mut extents = self.chunk_sizes.iter().map(extent);
        let meeting =
            extents.find_map(|extent| launches::need_meeting(self.plan, wiring, extent, self.memory, budget));
        self.back_to_back = meeting.is_none();
        self.findings.extend(meeting);
    }

    /// Range by range, as far as it can be done.
    fn prove_range(
        &mut self,
        wiring: &Wiring,
        expectation: Option<&Expectation>,
        gap: Gap,
        budget: &mut Budget,
    ) -> Result<(), Vec<Finding>> {
        let plan = self.plan;
        let whole = |kind| vec![Finding::new(plan, kind, Vec::new())];
        let (ranges, all) = sizes::ranges(plan).map_err(whole)?;
        for &last in &ranges {
            let known = self.chunk_sizes.len();
            let sizes = sizes::up_to(plan, last, &self.chunk_sizes).map_err(whole);
            match sizes.and_then(|sizes| self.prove(wiring, expectation, &sizes, budget)) {
                Ok(()) => self.largest_chunk = Some(last),
                Err(findings) if self.largest_chunk.is_some() && findings.iter().any(undecided) => {
                    self.chunk_sizes.truncate(known);
                    break;
                }
                Err(findings) => {
                    self.largest_chunk = None;
                    return Err(findings);
                }
            }
        }
        self.chunk_sizes.sort_unstable();
        let largest = self.largest_chunk.take_if(|largest| all && ranges.last() == Some(largest));
        if let (None, Some(largest_chunk)) = (largest, self.largest_chunk) {
            let kind = Kind::Range { largest_chunk, why: gap.why };
            self.findings.push(Finding::new(plan, kind, gap.places));
        }
        Ok(())
    }

    /// A plan that is well formed, and what its outputs must hold, if that is known.
    fn checked(&mut self, options: &Options) -> Result<(Wiring, Option<Expectation>), Vec<Finding>> {
        let plan = self.plan;
        let whole = |kind| vec![Finding::new(plan, kind, Vec::new())];
        plan.check().map_err(|error: PlanError| whole(Kind::Form { error: error.to_string() }))?;
        let wiring = Wiring::new(plan);
        stop(structure::check(plan, &wiring, FINDINGS))?;
        let expectation = match &options.expectation {
            Some(expectation) => Some(expectation.clone()),
            None => Expectation::of(plan).map_err(whole)?,
        };
        if let Some(expectation) = &expectation {
            expectation.check(plan).map_err(whole)?;
        }
        self.meaning = expectation.is_some();
        self.findings = usage::unused(plan);
        Ok((wiring, expectation))
    }

    /// Proves the plan at some more sizes.
    fn prove(
        &mut self,
        wiring: &Wiring,
        expectation: Option<&Expectation>,
        sizes: &[u64],
        budget: &mut Budget,
    ) -> Result<(), Vec<Finding>> {
        self.chunk_sizes.extend(sizes);
        for &chunk in sizes {
            let extent = Extent::of_chunk(chunk, self.plan.buffer_alignment);
            let (findings, in_rank_order) =
                at_size(self.plan, wiring, extent, expectation, self.memory, budget)?;
            self.in_rank_order &= in_rank_order;
            for finding in findings {
                if !self.findings.contains(&finding) {
                    self.findings.push(finding);
                }
            }
        }
        Ok(())
    }
}

fn undecided(finding: &Finding) -> bool {
    matches!(finding.kind, Kind::TooLarge { .. })
}

/// Errors end the proof; the rest goes on.
fn stop(findings: Vec<Finding>) -> Result<Vec<Finding>, Vec<Finding>> {
    match findings.iter().any(|finding| finding.severity() == Severity::Error) {
        true => Err(findings),
        false => Ok(findings),
    }
}

/// The warnings at one size of the chunks, and whether all reductions are in the order of the ranks.
///
/// # Errors
/// All findings, if there are errors.
fn at_size(
    plan: &Plan,
    wiring: &Wiring,
    extent: Extent,
    expectation: Option<&Expectation>,
    memory: Memory,
    budget: &mut Budget,
) -> Result<(Vec<Finding>, bool), Vec<Finding>> {
    let whole = |kind| vec![Finding::new(plan, kind, Vec::new())];
    let mut program = lower::program(plan, wiring, extent, 1, budget)?;
    let mut findings = schedule::unbalanced(&program);
    findings.truncate(FINDINGS);
    let cuts = values::cuts(&program, expectation);
    let cells = cells::cut(&mut program, &cuts).map_err(whole)?;
    budget.pieces(cells.len() + cells.pieces).map_err(whole)?;
    let schedule = match schedule::run(&program, &cells) {
        Ok(schedule) => schedule,
        Err(deadlock) => {
            findings.push(*deadlock);
            return Err(findings);
        }
    };
    let orders = order::orders(&program, &cells, &schedule, memory).map_err(whole)?;
    let runs = Runs::new(&program, &cells, budget.words);
    let races = races::find(&program, &cells, &schedule, &orders, &runs, &mut budget.pairs, FINDINGS);
    findings.extend(races.map_err(whole)?);
    let values = match program.contended() {
        true => values::check_runs(&program, &cells, &runs, expectation, FINDINGS),
        false => values::check(&program, &cells, &schedule, expectation, FINDINGS),
    };
    let values::Checked { found, left, in_rank_order } = values.map_err(whole)?;
    findings.extend(found);
    let findings = stop(findings)?;
    if cells.mixed() {
        let fooled = mistaken_packets::find(&program, &cells, &schedule, &orders, &runs, &left, FINDINGS);
        stop(fooled.map_err(whole)?)?;
    }
    budget.words = runs.left();
    Ok((findings, in_rank_order))
}
