//! Whether pipelines are free of deadlocks for every number of their iterations, which are called turns.
//!
//! Pipelines that signal each other, or share barriers, form a *section*. They have equally many turns. A counter that a
//! section uses has one thread block that adds to it and one that takes from it, and both move it equally far in each turn. Then
//! the `i`-th count that is taken in a turn is always added at the same place, in this turn or a fixed number of turns before:
//! the awaited count does not depend on the number of the turn.
//!
//! No number of turns can deadlock if there is a run in which the thread blocks of a section synchronise before
//! its first turn and after each turn. Between two synchronisations every counter returns to its value, so each turn runs as
//! the first did, and the steps after the last turn find the state that one turn leaves. (One run ends if and only if all runs
//! end; see [`schedule`](super::schedule).) This module tries that run.
//!
//! Packets in a pipeline must not be passed between thread blocks.
//!
//! Where several thread blocks take from one counter elsewhere in the plan, no run with these synchronisations may deadlock.
//!
//! Plans outside these conditions may be right, but are proved size by size.

use std::collections::{BTreeMap, HashMap};

use super::cells::{self, Cells};
use super::finding::Finding;
use super::lower::{self, Budget};
use super::program::{Agent, Counted, Counter, Link, Program, Step, What};
use super::runs::{Goal, Runs, Stalled};
use super::schedule;
use super::sizes::Gap;
use crate::extent::Extent;
use crate::ids::{Rank, SemaphoreId};
use crate::op::OpKind;
use crate::place::Place;
use crate::plan::Plan;
use crate::resolve::{Block, Wiring};

/// The numbers that must be equal for all pipelines of a section: bytes of a turn, and chunks of all turns.
type Form = (u64, u64);

/// A thread block's pipeline.
struct Loop {
    agent: u32,
    form: Form,
    /// The steps of all turns, and how many steps each has.
    steps: std::ops::Range<u32>,
    turn: u32,
    /// How often a turn uses what.
    uses: BTreeMap<Use, u32>,
    /// Another pipeline of its section; that of the section's first, itself.
    section: usize,
}

/// The counters and barriers through which pipelines synchronise.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Use {
    Adds(u32),
    Takes(u32),
    Meets(u32),
}

/// Why it cannot be told that a plan's pipelines go well however often they turn, if it cannot.
///
/// # Errors
/// As findings: all sorts that lowering has.
pub(super) fn gap(plan: &Plan, wiring: &Wiring, budget: &mut Budget) -> Result<Option<Gap>, Vec<Finding>> {
    let ops = plan.gpus.iter().flat_map(|gpu| &gpu.threadblocks).flat_map(|block| &block.ops);
    if !ops.clone().any(|op| matches!(op.kind, OpKind::Pipeline(_))) {
        return Ok(None);
    }
    let gap = |places, why: &str| Ok(Some(Gap { why: why.into(), places }));
    if let Err(place) = own_packets(plan) {
        return gap(
            vec![place],
            "packets carry no turn, and thread blocks pass some of a pipeline to each other",
        );
    }
    let whole = |kind| vec![Finding::new(plan, kind, Vec::new())];
    let extent = Extent::of_chunk(plan.buffer_alignment, plan.buffer_alignment);
    let mut program = lower::program(plan, wiring, extent, 1, budget)?;
    let loops = match sections(&program) {
        Ok(loops) => loops,
        Err((place, why)) => return gap(vec![place], why),
    };
    let first = loops.first().map(|first| program.steps[first.steps.start as usize].place);
    meet(&mut program, &loops);
    let cells = cells::cut(&mut program, &[]).map_err(whole)?;
    match stuck(&program, &cells, budget) {
        None => Ok(None),
        Some(places) if places.is_empty() => gap(first.into_iter().collect(), UNKNOWN),
        Some(places) => gap(places, UNKNOWN),
    }
}

const UNKNOWN: &str = "it may not end if the thread blocks of a pipeline take every turn together";

/// Where some run is stuck, or may be.
fn stuck(program: &Program<'_>, cells: &Cells, budget: &mut Budget) -> Option<Vec<Place>> {
    if !program.contended() {
        return schedule::run(program, cells).err().map(|stuck| stuck.places);
    }
    let runs = Runs::new(program, cells, budget.words);
    let mut each = [true, false].into_iter().map(|alone| {
        let state = runs.find(Stalled { alone, ..Stalled::default() }, Goal::Deadlock);
        let places = |state| runs.waits(&state).into_iter().map(|(place, _)| place).collect();
        state.map_or(Some(Vec::new()), |state| state.map(places))
    });
    let stuck = each.find_map(|stuck| stuck);
    budget.words = runs.left();
    stuck
}

/// Packets in a pipeline are those of the first turn, whenever they are read. So a thread block may keep some for itself,
/// and that is all.
///
/// # Errors
/// Where packets in a pipeline are another thread block's too.
fn own_packets(plan: &Plan) -> Result<(), Place> {
    let mut all = vec![Vec::new(); plan.gpus.len()];
    for block in Block::all(plan) {
        let mut add = |kind: &OpKind, place: Place| {
            block.accesses(kind, |access| {
                if access.packets {
                    all[access.rank.index()].push((access.chunks.start, access.chunks.end, place));
                }
            });
        };
        for (at, op) in block.get().ops.iter().enumerate() {
            add(&op.kind, block.place(at, None));
            if let OpKind::Pipeline(pipeline) = &op.kind {
                let inner = pipeline.ops.iter().enumerate();
                inner.for_each(|(inner, op)| add(&op.kind, block.place(at, Some(inner))));
            }
        }
    }
    for mut accesses in all {
        accesses.sort_unstable_by_key(|&(start, ..)| start);
        // One after the other, all that overlap.
        let mut reach = 0;
        let overlapping = accesses.chunk_by(|&(_, end, _), &(start, ..)| {
            reach = end.max(reach);
            start < reach
        });
        for each in overlapping {
            let block = |place: &Place| (place.rank, place.threadblock);
            let turned = each.iter().find(|(.., place)| place.inner.is_some());
            let alone = each.iter().all(|(.., place)| block(place) == block(&each[0].2));
            if let (Some(&(.., place)), false) = (turned, alone) {
                return Err(place);
            }
        }
    }
    Ok(())
}

/// All pipelines, thread block by thread block, with their sections.
///
/// # Errors
/// Where and why there is no telling.
fn sections(program: &Program<'_>) -> Result<Vec<Loop>, (Place, &'static str)> {
    let mut loops = loops(program);
    // The pipelines that use something, in order, of each agent that does.
    let mut users: BTreeMap<Use, Vec<usize>> = BTreeMap::new();
    for (number, each) in loops.iter().enumerate() {
        for &used in each.uses.keys() {
            users.entry(used).or_default().push(number);
        }
    }
    let place = |loops: &[Loop], number: usize| program.steps[loops[number].steps.start as usize].place;
    for (&used, numbers) in &users {
        let pairs = match used {
            Use::Meets(barrier) => {
                let agents = &program.meetings[barrier as usize].agents;
                let lists: Vec<Vec<usize>> = agents
                    .iter()
                    .map(|&(agent, _)| {
                        numbers.iter().copied().filter(|&number| loops[number].agent == agent).collect()
                    })
                    .collect();
                if lists.iter().any(|list| list.len() != lists[0].len()) {
                    return Err((
                        place(&loops, numbers[0]),
                        "a barrier is in it for some thread blocks and not for others",
                    ));
                }
                let rest =
                    lists[1..].iter().flat_map(|list| lists[0].iter().copied().zip(list.iter().copied()));
                rest.map(|(one, other)| (one, other, used)).collect::<Vec<_>>()
            }
            Use::Adds(counter) | Use::Takes(counter) => {
                let of = &program.counters[counter as usize];
                if of.releasers.len() > 1 || of.acquirers.len() > 1 {
                    return Err((
                        place(&loops, numbers[0]),
                        "several thread blocks add to or take from what is counted in it",
                    ));
                }
                let other = match used {
                    Use::Adds(_) => Use::Takes(counter),
                    _ => Use::Adds(counter),
                };
                let others = users.get(&other).map_or(&[][..], Vec::as_slice);
                if others.len() != numbers.len() {
                    return Err((
                        place(&loops, numbers[0]),
                        "what is added in it is not taken in one, or the reverse",
                    ));
                }
                numbers.iter().zip(others).map(|(&one, &another)| (one, another, other)).collect()
            }
        };
        for (one, other, by) in pairs {
            if loops[one].form != loops[other].form || loops[one].uses[&used] != loops[other].uses[&by] {
                return Err((
                    place(&loops, one),
                    "thread blocks that wait for each other take unequal turns",
                ));
            }
            let (one, other) = (root(&loops, one), root(&loops, other));
            loops[one.max(other)].section = one.min(other);
        }
    }
    Ok(loops)
}

fn root(loops: &[Loop], mut number: usize) -> usize {
    while loops[number].section != number {
        number = loops[number].section;
    }
    number
}

fn loops(program: &Program<'_>) -> Vec<Loop> {
    let mut loops = Vec::new();
    for (agent, Agent { steps, .. }) in program.agents.iter().enumerate() {
        let mut at = steps.start;
        while at < steps.end {
            let first = program.steps[at as usize].place;
            let same = |step: &Step| step.place.inner.is_some() && step.place.op == first.op;
            let all = &program.steps[at as usize..steps.end as usize];
            let len = all.iter().take_while(|step| same(step)).count() as u32;
            let outer = program.plan.op(Place { inner: None, ..first }).map(|op| &op.kind);
            let (Some(OpKind::Pipeline(pipeline)), 1..) = (outer, len) else {
                at += 1;
                continue;
            };
            let turn = pipeline.ops.len() as u32;
            let uses = uses(program, &all[..turn as usize]);
            let (steps, section) = (at..at + len, loops.len());
            let form = (pipeline.unit_size, pipeline.num_chunks);
            loops.push(Loop { agent: agent as u32, form, steps, turn, uses, section });
            at += len;
        }
    }
    loops
}

/// How often a turn uses what.
fn uses(program: &Program<'_>, turn: &[Step]) -> BTreeMap<Use, u32> {
    let mut uses = BTreeMap::new();
    for step in turn {
        match &step.what {
            What::Nop | What::Flush(_) => {}
            What::Barrier(barrier) => *uses.entry(Use::Meets(*barrier)).or_default() += 1,
            What::Acquire { links, .. } => {
                program
                    .links(links)
                    .iter()
                    .for_each(|link| *uses.entry(Use::Takes(link.counter)).or_default() += 1);
            }
            What::Release { links, .. } | What::Push { links, .. } => {
                program
                    .links(links)
                    .iter()
                    .for_each(|link| *uses.entry(Use::Adds(link.counter)).or_default() += 1);
            }
            What::Move(_) => {}
        }
    }
    uses
}

/// Has the thread blocks of each section meet before its first turn and after each, by counters of its own: all tell one,
/// and that one tells all.
fn meet(program: &mut Program<'_>, loops: &[Loop]) {
    let mut members: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for number in 0..loops.len() {
        members.entry(root(loops, number)).or_default().push(number);
    }
    let mut gates: HashMap<usize, [What; 2]> = HashMap::new();
    for numbers in members.values().filter(|numbers| numbers.len() > 1) {
        let times = loops[numbers[0]].steps.len() as u32 / loops[numbers[0]].turn + 1;
        let (first, rest) = (numbers[0], &numbers[1..]);
        let mut counter = |from: &[usize], to: usize| {
            let count = |&number: &usize| (loops[number].agent, times);
            // The report does not name their owners.
            let counted = Counted::Semaphore { rank: Rank(0), semaphore: SemaphoreId(0) };
            let releasers = from.iter().map(count).collect();
            program.counters.push(Counter { counted, initial: 0, releasers, acquirers: vec![count(&to)] });
            program.counters.len() as u32 - 1
        };
        let come = counter(rest, first);
        let go: Vec<u32> = rest.iter().map(|&number| counter(&[first], number)).collect();
        let mut links = |counters: &[u32]| {
            let from = program.links.len() as u32;
            program.links.extend(counters.iter().map(|&counter| Link { counter, port: None }));
            from..program.links.len() as u32
        };
        let take = |links| What::Acquire { links, relaxed: false };
        let add = |links| What::Release { links, relaxed: false };
        gates.insert(first, [take(links(&vec![come; rest.len()])), add(links(&go))]);
        for (&number, &go) in rest.iter().zip(&go) {
            gates.insert(number, [add(links(&[come])), take(links(&[go]))]);
        }
    }
    let mut steps: Vec<Step> = Vec::with_capacity(program.steps.len());
    let mut loops = loops.iter().enumerate().peekable();
    for agent in &mut program.agents {
        let first = steps.len() as u32;
        for at in agent.steps.clone() {
            let step = &program.steps[at as usize];
            let gate = |number: &usize| {
                let gate = gates.get(number).into_iter().flatten().cloned();
                gate.map(|what| Step { what, ..step.clone() })
            };
            let current = loops.peek().filter(|(_, each)| each.steps.contains(&at)).copied();
            if let Some((number, _)) =
                current.filter(|(_, each)| (at - each.steps.start).is_multiple_of(each.turn))
            {
                steps.extend(gate(&number));
            }
            steps.push(step.clone());
            if let Some((number, _)) = current.filter(|(_, each)| at + 1 == each.steps.end) {
                steps.extend(gate(&number));
                loops.next();
            }
        }
        agent.steps = first..steps.len() as u32;
    }
    program.steps = steps;
}
