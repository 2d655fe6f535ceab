//! The sizes at which a plan is proved, which represent all sizes.
//!
//! Sizes are those of a chunk: whole units of the alignment, from one unit up to what the largest message allows. The
//! smallest message is no limit, for a chunk may be run in parts ([`Extent::part`]).
//!
//! # What a size decides
//!
//! Let `C` be the bytes of a chunk. All ranges begin at whole chunks, and a move takes byte `z` of one range to byte `z` of
//! another: so a byte only ever meets bytes that lie as far from the beginning of their chunk, `y`. Call all bytes of one `y`
//! a *fiber*. An operation on `n` chunks meets a fiber in bytes `kC + y` of its range, `k < n`, each time unless another
//! thread block of its group takes that byte, and, in a pipeline of units of `u` bytes, in turn `⌊(kC + y − a) / u⌋`, where
//! `a` is where the block's share begins. The *pattern* of a fiber says all that: for each kind of operation and each `k`
//! whether it meets the fiber and in which turn, and of each pipeline how many turns `T` there are.
//!
//! What happens before what follows from the steps and from how often pipelines turn, not from bytes. So whether there are
//! races or wrong values in a fiber depends on its pattern alone, and a plan is right at a size if it is right for each
//! pattern there, and deadlocks at none. (Readers wait for packets, so the writer and the reader of a
//! packet add to what happens before what. Where groups share packets, patterns are compared only between sizes at which the same
//! operations meet in packets.)
//!
//! # Sizes with the same patterns
//!
//! Let `M` be the least common multiple of the sizes of groups. For sizes `r + qM` with one `r`, where shares begin and end
//! is affine in `q`. While `T` is the same, "the fiber `y` has the pattern `p`" is a number of affine inequalities in `q` and
//! `y` (before a share, in turn `t` of it, or behind it), so how many `y` have `p` is a concave function of `q` where any
//! has. If two sizes have the same set of patterns, those counts add up to `C` at both, hence to at least `C` between
//! them: there, too, these are the patterns, and no others. So halving finds all sets of patterns there are.
//!
//! # Fewer turns
//!
//! Where the turns of all thread blocks go in step ([`pipelines`](super::pipelines) proves it, or says why not), a step of turn
//! `t` waits for steps at most as late and of always the same distance in turns. Then whatever is ordered stays ordered when
//! turns are added before, between and behind: if a step in turn `t` comes before one in turn `t + d`, it does so for all
//! `t` and all larger `d`. So a pattern is right if another is that has the same operations, the turns of a pipeline in the
//! same order (and equal where they are equal), no larger distances between them, from the first turn, and to the last.
//! The least patterns of this order are looked at, all others follow.
//!
//! Packets in a pipeline, which a thread block can only keep for itself, are those of the first turn, and met in every turn.
//! Where there are any, a distance of less than three turns follows only from an equal one, and one of three or more only
//! from such.
//!
//! # No more sizes
//!
//! Without pipelines, halving goes up to the largest size. With pipelines, let `U` be the largest unit.
//!
//! * Without groups and without packets in pipelines, if every unit divides `U`, and the alignment every unit, `C = U` is
//!   the last size: at a larger `C′` the fiber `y` has nothing that the fiber `min(y, C − 1)` at `C` has not. For the turns
//!   of different `k` lie apart by whole `C / u` here and by no less there, and neither are there fewer bytes before them
//!   nor behind them.
//! * Otherwise let `L` be the `M` of the groups in pipelines alone and `m` the largest group, all in units of the alignment,
//!   and `w = max(L(U + m), Mm) + M`. (If packets are in pipelines, take `M` for `L` and `4U` for `U`.) From `w − M` on, all
//!   that begins and ends in a fiber is in one order for all sizes of
//!   one `r`, and what is at no constant distance moves apart, by `1/M` byte at least for each byte of a chunk (`1/L` in
//!   pipelines; rounding is less than `m`); what turns differently is more than a unit apart. `w + 2MU` is the last size: of
//!   a larger one take that below `w` with the same `r`, and of a fiber, one that the same operations meet there. Turns lie
//!   at least two units closer to each other, so their distances are no larger. What begins first and what ends last in the
//!   fiber are two units closer too, so that there is a `y` with no more bytes before it in any share, and a unit less behind
//!   it in any pipeline; or it is the last of its chunk, and in the last turn of those for which there is not.
//!
//! For this, nothing may turn differently at a constant distance, which shares of different groups can, and no share may be
//! longer than its pipeline.
//!
//! # One size after the other
//!
//! Where that is not so, or turns do not go in step, all patterns are looked at, each by itself, up to sizes at which the
//! slowest pipeline has some turns ([`ranges`]). Where groups or turns cut chunks, and some bytes of scratch hold packets and
//! plain data, fibers meet each other, for packets take two bytes, and there are no patterns: then all sizes are looked at.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use super::finding::Kind;
use crate::extent::Extent;
use crate::ids::Rank;
use crate::op::{BufferType, CopyKind, GroupShare, Op, OpKind, PutKind};
use crate::place::Place;
use crate::plan::Plan;
use crate::resolve::{Access, Block};

/// Most chunks of a buffer: no memory holds more.
const CHUNKS: u64 = 1 << 36;

/// Most bytes of the alignment.
const ALIGNMENT: u64 = 1 << 26;

/// Most bytes that a buffer may have.
const BUFFER: u64 = 1 << 60;

/// The number of turns that stands for every number of turns, where packets are in pipelines.
const FEW: u64 = 3;

/// Most residues of sizes.
const RESIDUES: u64 = 1 << 12;

/// How many turns the slowest pipeline has in one range after the other.
const RANGES: [u64; 4] = [4, 8, 16, 32];

/// The unit of a turn where there are no pipelines.
const NO_TURN: u64 = 4;

/// Most sizes one after the other.
const EACH: u64 = 1 << 10;

/// Most sets of patterns.
const CLASSES: usize = 1 << 13;

/// Most steps of looking for patterns.
const WORK: u64 = 1 << 25;

/// Bytes of a chunk, ascending.
///
/// # Errors
/// [`Kind::NoSize`] or [`Kind::TooLarge`]
pub(super) fn of(plan: &Plan) -> Result<Vec<u64>, Kind> {
    let most = most(plan)?;
    let mut sizes = Sizes::new(plan);
    let classes = sizes.classes(sizes.last().map_or(most, |last| last.min(most)))?;
    Ok(cover(&least(&mut sizes, &classes)?))
}

/// Why a few sizes do not stand for all.
pub(super) struct Gap {
    pub why: String,
    /// Where.
    pub places: Vec<Place>,
}

impl Gap {
    fn new(why: String) -> Self {
        Gap { why, places: Vec::new() }
    }
}

/// Why not all sizes follow from [`of`], if they do not, though pipelines go in step.
///
/// # Errors
/// As [`of`].
pub(super) fn gap(plan: &Plan) -> Result<Option<Gap>, Kind> {
    let sizes = Sizes::new(plan);
    if let Some(rank) = sizes.mixed {
        return Ok(Some(Gap::new(format!(
            "groups or turns cut chunks of rank {rank}'s scratch that hold packets and plain data in the same bytes"
        ))));
    }
    Ok(match sizes.last() {
        Some(last) if last < most(plan)? => sizes.gap(),
        _ => None,
    })
}

/// Ever larger chunks, in bytes, up to which all may be looked at, and whether the last of them is the largest that there is.
///
/// # Errors
/// As [`of`].
pub(super) fn ranges(plan: &Plan) -> Result<(Vec<u64>, bool), Kind> {
    let (most, sizes) = (most(plan)?, Sizes::new(plan));
    let alignment = plan.buffer_alignment;
    let turn = |&(unit, chunks): &(u64, u64), turns: u64| {
        (u128::from(unit) * u128::from(turns)).div_ceil(u128::from(chunks) * u128::from(alignment))
    };
    let last = |turns: u64| {
        let each = sizes.pipelines.iter().map(|pipeline| turn(pipeline, turns));
        each.max().map_or(turns * NO_TURN, |units| units.min(u128::from(most)) as u64)
    };
    let mut ranges: Vec<u64> = RANGES.into_iter().map(|turns| last(turns).min(most) * alignment).collect();
    ranges.dedup();
    let all = ranges.last() == Some(&(most * alignment));
    Ok((ranges, all))
}

/// Bytes of a chunk that together with those that are known have all patterns that there are up to `last`.
///
/// # Errors
/// [`Kind::TooLarge`]
pub(super) fn up_to(plan: &Plan, last: u64, known: &[u64]) -> Result<Vec<u64>, Kind> {
    let (alignment, mut sizes) = (plan.buffer_alignment, Sizes { apart: u64::MAX, ..Sizes::new(plan) });
    let last = last / alignment;
    if sizes.mixed.is_some() {
        return match last <= EACH {
            true => {
                Ok((1..=last).map(|units| units * alignment).filter(|size| !known.contains(size)).collect())
            }
            false => Err(Kind::TooLarge { what: "sizes of a chunk", limit: EACH }),
        };
    }
    let mut classes = sizes.classes(last)?;
    for &size in known {
        classes.insert(size, sizes.patterns(size / alignment)?);
    }
    let mut of = least(&mut sizes, &classes)?;
    let seen: BTreeSet<usize> = known.iter().filter_map(|size| of.remove(size)).flatten().collect();
    of.values_mut().for_each(|numbers| numbers.retain(|number| !seen.contains(number)));
    Ok(cover(&of))
}

/// A rank whose scratch has chunks in whose bytes are packets and plain data: packets of a chunk take two, from twice as
/// far. So they meet bytes of other fibers.
fn mixed_scratch(plan: &Plan) -> Option<Rank> {
    let mut all = vec![[Vec::new(), Vec::new()]; plan.gpus.len()];
    for block in Block::all(plan) {
        let ops = block.get().ops.iter().flat_map(|op| match &op.kind {
            OpKind::Pipeline(pipeline) => &pipeline.ops[..],
            _ => std::slice::from_ref(op),
        });
        for op in ops {
            block.accesses(&op.kind, |Access { rank, buffer, chunks, packets, .. }| {
                if buffer == BufferType::Scratch && !chunks.is_empty() {
                    let times = 1 + u64::from(packets);
                    all[rank.index()][usize::from(packets)].push((times * chunks.start, times * chunks.end));
                }
            });
        }
    }
    let mixed = all.iter_mut().position(|[plain, packets]| {
        plain.sort_unstable();
        // Up to each, how far those reach that begin no later.
        let reach = plain.iter().scan(0, |far, &(_, end)| {
            *far = end.max(*far);
            Some(*far)
        });
        let reach: Vec<u64> = reach.collect();
        packets.iter().any(|&(start, end)| {
            let begun = plain.partition_point(|&(other, _)| other < end);
            begun > 0 && reach[begun - 1] > start
        })
    });
    mixed.map(|rank| Rank(rank as u32))
}

/// The largest chunk, in units of the alignment.
fn most(plan: &Plan) -> Result<u64, Kind> {
    let alignment = plan.buffer_alignment;
    let largest = plan.gpus.iter().flat_map(|gpu| [gpu.input_chunks, gpu.output_chunks, gpu.scratch_chunks]);
    let largest = largest.max().unwrap_or(0);
    let most = most_units(plan)?;
    if largest > CHUNKS {
        return Err(Kind::TooLarge { what: "chunks of a buffer", limit: CHUNKS });
    }
    // In place, a rank's part begins behind those of all before it.
    let far = largest.saturating_mul(plan.num_ranks() as u64 + 1).max(1);
    let most = most.min(BUFFER / far.saturating_mul(alignment));
    if alignment > ALIGNMENT || most == 0 {
        return Err(Kind::TooLarge { what: "bytes of a buffer", limit: BUFFER });
    }
    Ok(most)
}

/// The largest chunk that a message can have, in units of the alignment.
fn most_units(plan: &Plan) -> Result<u64, Kind> {
    let (alignment, smallest, largest) =
        (plan.buffer_alignment, plan.min_message_size, plan.max_message_size);
    let chunks = plan.gpus.first().map_or(0, |gpu| match plan.collective.as_str() {
        "allgather" => gpu.output_chunks,
        _ => gpu.input_chunks,
    });
    if chunks == 0 {
        return Ok(u64::MAX / alignment);
    }
    let (min, max) = (smallest.div_ceil(chunks).div_ceil(alignment).max(1), largest / chunks / alignment);
    match min <= max {
        true => Ok(max),
        false => Err(Kind::NoSize {
            why: format!(
                "{smallest} to {largest} bytes hold no {chunks} chunks of whole multiples of {alignment} bytes"
            ),
        }),
    }
}

/// How operations of one kind divide the bytes of their chunks.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Division {
    chunks: u64,
    /// The place in the group and its size; of no group, one alone.
    group: (u32, u32),
    /// The unit of the pipeline, and how many chunks it covers.
    pipeline: Option<(u64, u64)>,
    packets: bool,
}

impl Division {
    fn share(&self, extent: Extent) -> std::ops::Range<u64> {
        let (tb_id, tbg_size) = self.group;
        extent.share(&(0..self.chunks * extent.chunk()), GroupShare { tb_id, tbg_size })
    }
}

/// Calls `each` with the chunks, the group and whether there are packets, for all moves of an operation.
fn moves(op: &OpKind, mut each: impl FnMut(u64, Option<GroupShare>, bool)) {
    match op {
        OpKind::Nop
        | OpKind::Barrier { .. }
        | OpKind::Notify(_)
        | OpKind::Semaphore(_)
        | OpKind::Pipeline(_) => {}
        OpKind::Copy(copy) => each(copy.src.size, copy.group, copy.kind != CopyKind::Plain),
        OpKind::Put(put) => {
            let packets = matches!(put.kind, PutKind::Packets | PutKind::ReadPackets);
            put.dst.iter().for_each(|dst| each(dst.size, put.group, packets));
        }
        OpKind::Get(get) => get.dst.iter().for_each(|dst| each(dst.size, get.group, false)),
        OpKind::Reduce(reduce) => each(reduce.dst.size, reduce.group, reduce.packets),
        OpKind::SwitchReduce(op) => each(op.size, None, false),
        OpKind::SwitchBroadcast(op) => each(op.src.size, None, op.packets),
        OpKind::SwitchReduceBroadcast(op) => each(op.src.size, None, false),
    }
}

/// The state of an operation's chunk for a fiber: one of these, or the turn, counted from [`MET`].
type State = u64;
const BEFORE: State = 0;
const BEHIND: State = 1;
/// In a turn that the pipeline does not have.
const BEYOND: State = 2;
const MET: State = 3;

/// All fibers' patterns at one size.
#[derive(PartialEq, Eq)]
struct Patterns {
    /// For each pipeline, how many turns it has.
    turns: Vec<u64>,
    /// For each pattern, the states of all chunks of all divisions.
    each: BTreeSet<Vec<State>>,
}

struct Sizes {
    alignment: u64,
    divisions: Vec<Division>,
    /// All that occur among the divisions, and others.
    pipelines: Vec<(u64, u64)>,
    /// Whether packets stand in one: then the first turn is not like the others.
    first: bool,
    /// How many turns are as good as any larger number.
    apart: u64,
    /// A rank in whose scratch packets and plain data share bytes of chunks that are cut.
    mixed: Option<Rank>,
    work: u64,
}

impl Sizes {
    fn new(plan: &Plan) -> Self {
        let mut divisions = BTreeSet::new();
        let mut pipelines = BTreeSet::new();
        let mut first = false;
        let mut add = |op: &Op, pipeline: Option<(u64, u64)>| {
            moves(&op.kind, |chunks, group, packets| {
                first |= packets && pipeline.is_some();
                let group = group.map_or((0, 1), |group| (group.tb_id, group.tbg_size));
                // Packets carry no turn.
                let pipeline = pipeline.filter(|_| !packets);
                if chunks > 0 && (group.1 > 1 || pipeline.is_some()) {
                    divisions.insert(Division { chunks, group, pipeline, packets });
                }
            });
        };
        for op in plan.gpus.iter().flat_map(|gpu| &gpu.threadblocks).flat_map(|block| &block.ops) {
            match &op.kind {
                OpKind::Pipeline(of) => {
                    let pipeline = (of.unit_size, of.num_chunks);
                    of.ops.iter().for_each(|op| add(op, Some(pipeline)));
                    if of.num_chunks > 0 && !of.ops.is_empty() {
                        pipelines.insert(pipeline);
                    }
                }
                _ => add(op, None),
            }
        }
        let divisions =
            divisions.into_iter().filter(|division| division.pipeline.is_none_or(|(_, chunks)| chunks > 0));
        let divisions: Vec<_> = divisions.collect();
        Sizes {
            alignment: plan.buffer_alignment,
            pipelines: pipelines.into_iter().collect(),
            first,
            apart: if first { FEW } else { 0 },
            mixed: if divisions.is_empty() { None } else { mixed_scratch(plan) },
            divisions,
            work: 0,
        }
    }

    /// The least common multiple of the groups of some divisions; above the limit, any number above it.
    fn multiple(&self, of: impl Fn(&Division) -> bool) -> u64 {
        let groups =
            self.divisions.iter().filter(|division| of(division)).map(|division| u64::from(division.group.1));
        groups.fold(1, |multiple, size| {
            let (mut a, mut b) = (multiple, size);
            while b > 0 {
                (a, b) = (b, a % b);
            }
            (multiple / a).saturating_mul(size).min(RESIDUES + 1)
        })
    }

    /// The last size, in units, behind which there is nothing new, if pipelines turn.
    fn last(&self) -> Option<u64> {
        let unit = self.pipelines.iter().map(|&(unit, _)| unit).max()?;
        let units = unit.div_ceil(self.alignment);
        let all = self.multiple(|_| true);
        let nested = self
            .pipelines
            .iter()
            .all(|(each, _)| each.is_multiple_of(self.alignment) && unit.is_multiple_of(*each));
        Some(if all == 1 && nested && !self.first {
            units
        } else {
            let within = if self.first { all } else { self.multiple(|division| division.pipeline.is_some()) };
            let units = if self.first { units.saturating_mul(1 + FEW) } else { units };
            let group = self.divisions.iter().map(|division| u64::from(division.group.1)).max().unwrap_or(1);
            let order = within.saturating_mul(units.saturating_add(group)).max(all.saturating_mul(group));
            order.saturating_add(all).saturating_add(all.saturating_mul(units).saturating_mul(2))
        })
    }

    /// Why pipelines are not such that large sizes follow from small ones, if they are not.
    fn gap(&self) -> Option<Gap> {
        let turned = || {
            self.divisions
                .iter()
                .filter_map(|division| division.pipeline.map(|pipeline| (division, pipeline)))
        };
        for (division, (_, covered)) in turned() {
            let (chunks, group) = (division.chunks, u64::from(division.group.1));
            if chunks > covered.saturating_mul(group) {
                return Some(Gap::new(format!(
                    "the turns of a pipeline cover {covered} chunks, and an operation in it has {chunks}"
                )));
            }
        }
        // Where the shares of each group begin, to the unit, at every residue; equal on average must be equal.
        let multiple = self.multiple(|division| division.pipeline.is_some());
        let mut begins = BTreeMap::new();
        for (division, pipeline) in turned().filter(|_| multiple <= RESIDUES) {
            let (place, size) = (u64::from(division.group.0), u64::from(division.group.1));
            let average = place * (division.chunks % size) % size * (multiple / size);
            // The amount by which the beginning of the share exceeds the average, as a fraction.
            let rounding = |units: u64| {
                let extent = Extent::of_chunk(units * self.alignment, self.alignment);
                let begins = division.share(extent).start / self.alignment;
                let average = i128::from(place) * i128::from(division.chunks) * i128::from(units);
                (i128::from(begins) * i128::from(size) - average) * i128::from(multiple / size)
            };
            let rounding: Vec<_> = (1..=multiple).map(rounding).collect();
            if *begins.entry((pipeline, average)).or_insert_with(|| rounding.clone()) != rounding {
                return Some(Gap::new("groups divide the same chunks in almost the same places".into()));
            }
        }
        None
    }

    /// The patterns at one size, in units.
    fn patterns(&mut self, units: u64) -> Result<Rc<Patterns>, Kind> {
        let extent = Extent::of_chunk(units * self.alignment, self.alignment);
        let chunk = extent.chunk();
        let turns = |&(unit, chunks): &(u64, u64)| chunks.saturating_mul(chunk).div_ceil(unit);
        let slots: u64 = self.divisions.iter().map(|division| division.chunks).fold(0, u64::saturating_add);
        self.spend(slots)?;
        let mut marks = vec![0];
        for division in &self.divisions {
            let share = division.share(extent);
            for k in 0..division.chunks {
                let from = share.start.max(k * chunk);
                let to = share.end.min((k + 1) * chunk);
                if from >= to {
                    continue;
                }
                marks.extend([from - k * chunk, to - k * chunk]);
                let Some((unit, _)) = division.pipeline else { continue };
                let first = (from - share.start) / unit + 1;
                let last = (to - 1 - share.start) / unit;
                if (last + 1).saturating_sub(first) + marks.len() as u64 > WORK {
                    return Err(too_large());
                }
                marks.extend((first..=last).map(|turn| share.start + turn * unit - k * chunk));
            }
        }
        marks.sort_unstable();
        marks.dedup();
        marks.retain(|&mark| mark < chunk);
        self.spend(slots.saturating_mul(marks.len() as u64))?;
        let each = marks.iter().map(|&y| {
            let state = |division: &Division, k: u64| {
                let (share, at) = (division.share(extent), k * chunk + y);
                match division.pipeline {
                    _ if at < share.start => BEFORE,
                    _ if at >= share.end => BEHIND,
                    None => MET,
                    Some(pipeline) => match (at - share.start) / pipeline.0 {
                        turn if turn < turns(&pipeline) => MET + turn,
                        _ => BEYOND,
                    },
                }
            };
            let states = self
                .divisions
                .iter()
                .flat_map(|division| (0..division.chunks).map(move |k| state(division, k)));
            states.collect()
        });
        let each = each.collect();
        Ok(Rc::new(Patterns { turns: self.pipelines.iter().map(turns).collect(), each }))
    }

    fn spend(&mut self, work: u64) -> Result<(), Kind> {
        self.work = self.work.saturating_add(work).saturating_add(1);
        if self.work > WORK { Err(too_large()) } else { Ok(()) }
    }

    /// Sizes in bytes, ascending, with all sets of patterns that there are up to `last` units.
    fn classes(&mut self, last: u64) -> Result<BTreeMap<u64, Rc<Patterns>>, Kind> {
        let step = self.multiple(|_| true);
        if step > RESIDUES {
            return Err(Kind::TooLarge { what: "ways in which groups divide a chunk", limit: RESIDUES });
        }
        let mut classes = BTreeMap::new();
        for first in 1..=step.min(last) {
            let behind = (last - first) / step;
            let mut todo = vec![(0, self.patterns(first)?, behind, self.patterns(first + behind * step)?)];
            while let Some((low, at_low, high, at_high)) = todo.pop() {
                classes.insert((first + low * step) * self.alignment, at_low.clone());
                if at_low == at_high {
                    continue;
                }
                classes.insert((first + high * step) * self.alignment, at_high.clone());
                let middle = low + (high - low) / 2;
                if middle > low {
                    let at_middle = self.patterns(first + middle * step)?;
                    todo.push((middle, at_middle.clone(), high, at_high));
                    todo.push((low, at_low, middle, at_middle));
                }
                if classes.len() > CLASSES {
                    return Err(too_large());
                }
            }
        }
        Ok(classes)
    }

    /// For each chunk of each division, the pipeline that it stands in, by number.
    fn slots(&self) -> Vec<Option<usize>> {
        let numbers: BTreeMap<_, _> = self.pipelines.iter().enumerate().map(|(at, &of)| (of, at)).collect();
        let number = |division: &Division| division.pipeline.and_then(|of| numbers.get(&of).copied());
        self.divisions
            .iter()
            .flat_map(|division| (0..division.chunks).map(move |_| number(division)))
            .collect()
    }

    /// What two patterns must have in common to be compared (which chunks of which divisions meet the fiber, and in the how
    /// manieth of the turns that do), and what is compared.
    fn parts(
        &mut self,
        slots: &[Option<usize>],
        patterns: &Patterns,
        states: &[State],
    ) -> Result<(Vec<(usize, usize)>, Turns), Kind> {
        self.spend((slots.len() + self.pipelines.len()) as u64)?;
        let met = || slots.iter().zip(states).enumerate().filter(|(_, (_, state))| **state >= MET);
        let mut levels = vec![Vec::new(); self.pipelines.len()];
        for (_, (pipeline, state)) in met() {
            if let Some(pipeline) = *pipeline {
                levels[pipeline].push(state - MET);
            }
        }
        for levels in &mut levels {
            levels.sort_unstable();
            levels.dedup();
        }
        let rank = |pipeline: Option<usize>, turn: u64| {
            pipeline.map_or(0, |pipeline| levels[pipeline].partition_point(|&level| level < turn))
        };
        let common = met().map(|(slot, (pipeline, state))| (slot, rank(*pipeline, state - MET))).collect();
        let turns = patterns.turns.iter().zip(&levels);
        Ok((common, turns.map(|(&turns, levels)| [&[turns][..], levels].concat()).collect()))
    }
}

fn too_large() -> Kind {
    Kind::TooLarge { what: "steps of looking for sizes", limit: WORK }
}

/// How many turns a pipeline has, and then those that meet a fiber, ascending.
type Turns = Vec<Vec<u64>>;

/// The distances from the beginning to the first turn that meets a fiber, from each such turn to the next, and from the last to the
/// end.
fn distances(turns: &[u64]) -> impl Iterator<Item = u64> {
    let mut before = 0;
    turns[1..].iter().chain(&turns[..1]).map(move |&turn| turn - std::mem::replace(&mut before, turn))
}

/// Whether one pattern follows from another that has the same operations, in turns of the same order.
fn follows(turns: &Turns, from: &Turns) -> bool {
    turns
        .iter()
        .zip(from)
        .all(|(turns, from)| distances(turns).zip(distances(from)).all(|(all, less)| less <= all))
}

/// For each size the patterns that follow from no others, by number.
///
/// # Errors
/// [`Kind::TooLarge`]
fn least(
    sizes: &mut Sizes,
    classes: &BTreeMap<u64, Rc<Patterns>>,
) -> Result<BTreeMap<u64, BTreeSet<usize>>, Kind> {
    let (slots, apart) = (sizes.slots(), sizes.apart);
    let packets = sizes.divisions.iter().flat_map(|division| (0..division.chunks).map(|_| division.packets));
    let packets: Vec<bool> = packets.collect();
    let meets = |patterns: &Patterns| -> BTreeSet<Vec<bool>> {
        let meets = |states: &Vec<State>| -> Vec<bool> {
            states.iter().zip(&packets).map(|(&state, &packets)| packets && state >= MET).collect()
        };
        patterns.each.iter().map(meets).collect()
    };
    let few = |turns: &Turns| -> Vec<u64> {
        turns.iter().flat_map(|turns| distances(turns)).map(|distance| distance.min(apart)).collect()
    };
    let mut known: BTreeMap<_, Vec<(Turns, usize)>> = BTreeMap::new();
    let mut next = 0;
    let mut of: BTreeMap<u64, BTreeSet<usize>> = BTreeMap::new();
    for (&size, patterns) in classes {
        let meets = meets(patterns);
        for states in &patterns.each {
            let (common, turns) = sizes.parts(&slots, patterns, states)?;
            let known = known.entry((meets.clone(), few(&turns), common)).or_default();
            sizes.spend((known.len() * turns.len()) as u64)?;
            match known.iter().find(|(other, _)| follows(&turns, other)) {
                Some((other, number)) if *other == turns => {
                    of.entry(size).or_default().insert(*number);
                }
                Some(_) => {}
                None => {
                    known.retain(|(other, _)| !follows(other, &turns));
                    known.push((turns, next));
                    of.entry(size).or_default().insert(next);
                    next += 1;
                }
            }
        }
    }
    let least: BTreeSet<usize> = known.values().flatten().map(|(_, number)| *number).collect();
    of.values_mut().for_each(|numbers| numbers.retain(|number| least.contains(number)));
    Ok(of)
}

/// A few sizes that together have all numbers.
fn cover(of: &BTreeMap<u64, BTreeSet<usize>>) -> Vec<u64> {
    let mut missing: BTreeSet<usize> = of.values().flatten().copied().collect();
    let mut sizes = BTreeSet::new();
    while !missing.is_empty() {
        let new = |numbers: &BTreeSet<usize>| numbers.intersection(&missing).count();
        // The smallest of those with most.
        let best = of.iter().rev().max_by_key(|(_, numbers)| new(numbers)).expect("some size has it");
        sizes.insert(*best.0);
        best.1.iter().for_each(|number| {
            missing.remove(number);
        });
    }
    sizes.into_iter().collect()
}
