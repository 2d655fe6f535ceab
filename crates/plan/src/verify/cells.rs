//! Memory divided into the largest cells such that every move takes whole cells to whole cells.
//!
//! All bytes of a cell are treated alike, so the proof works on cells, and their number does not depend on the bytes of a
//! chunk. A cell ends where some access begins or ends, and where a move carries such a boundary from one of its ends to the other.

use std::ops::Range;

use crate::ids::Rank;

use super::finding::{Kind, Region};
use super::program::{KINDS, Location, Program, View, home};
use crate::op::BufferType;

/// Most cells, and most pieces of moves.
const LIMIT: usize = 1 << 24;

/// Most cuts that are looked at in carrying them from one end of moves to the other.
const WORK: usize = 1 << 25;

/// The cells of all views.
#[derive(Debug)]
pub(super) struct Cells {
    /// For each view, where cells begin, ascending, and where the last one ends.
    cuts: Vec<Vec<u64>>,
    /// The number of each view's first cell, and that behind the last.
    first: Vec<u32>,
    chunk: u64,
    inplace: bool,
    /// For each rank, whether packets and plain data share bytes of its scratch.
    mixed: Vec<bool>,
    pub pieces: usize,
}

/// Cuts memory, and tells every location and move of its cells. `more` are places to cut besides.
///
/// # Errors
/// [`Kind::TooLarge`]
pub(super) fn cut(program: &mut Program<'_>, more: &[(View, u64)]) -> Result<Cells, Kind> {
    let mut cuts = vec![Vec::new(); program.plan.gpus.len() * KINDS as usize];
    let mut fresh: Vec<(View, u64)> = more.to_vec();
    for each in &program.moves {
        for place in program.sources(each).iter().chain(program.dests(each)) {
            fresh.extend([(place.view, place.start), (place.view, place.start + each.len)]);
        }
    }
    let (mut total, mut work) = (0, 0);
    while !fresh.is_empty() {
        total += insert(&mut cuts, std::mem::take(&mut fresh));
        work += total + program.locations.len();
        let most = WORK.max(8 * program.locations.len());
        if total <= LIMIT && work <= most {
            work += carry(program, &cuts, &mut fresh, most - work);
        }
        if total > LIMIT || work > most || fresh.len() > LIMIT {
            return Err(Kind::TooLarge { what: "pieces of memory", limit: LIMIT as u64 });
        }
    }
    let mut first = Vec::with_capacity(cuts.len() + 1);
    let mut next = 0;
    for cuts in &cuts {
        first.push(next);
        next += cuts.len().saturating_sub(1) as u32;
    }
    first.push(next);
    let (chunk, inplace) = (program.chunk, program.plan.inplace);
    let mixed = mixed(program);
    let mut cells = Cells { cuts, first, chunk, inplace, mixed, pieces: 0 };
    cells.tell(program)?;
    Ok(cells)
}

/// Adds cuts, and says how many were new.
fn insert(cuts: &mut [Vec<u64>], fresh: Vec<(View, u64)>) -> usize {
    let mut touched: Vec<usize> = fresh.iter().map(|(view, _)| view.index()).collect();
    touched.sort_unstable();
    touched.dedup();
    let before: usize = touched.iter().map(|&view| cuts[view].len()).sum();
    for (view, at) in fresh {
        cuts[view.index()].push(at);
    }
    for &view in &touched {
        cuts[view].sort_unstable();
        cuts[view].dedup();
    }
    touched.iter().map(|&view| cuts[view].len()).sum::<usize>() - before
}

/// The cuts that lie strictly in a location.
fn inside<'c>(cuts: &'c [Vec<u64>], place: &Location, len: u64) -> &'c [u64] {
    let cuts = &cuts[place.view.index()];
    let from = cuts.partition_point(|&at| at <= place.start);
    let to = from + cuts[from..].partition_point(|&at| at < place.start + len);
    &cuts[from..to]
}

/// Cuts that moves carry to where there are none yet, and how many were looked at: hardly more than `most`.
fn carry(program: &Program<'_>, cuts: &[Vec<u64>], fresh: &mut Vec<(View, u64)>, most: usize) -> usize {
    let (mut relative, mut work): (Vec<u64>, _) = (Vec::new(), 0);
    for each in &program.moves {
        let places = || program.sources(each).iter().chain(program.dests(each));
        relative.clear();
        let mut uneven = false;
        let mut count = None;
        for place in places() {
            let inside = inside(cuts, place, each.len);
            uneven |= count.replace(inside.len()).is_some_and(|count| count != inside.len());
            relative.extend(inside.iter().map(|at| at - place.start));
        }
        work += relative.len();
        if work > most {
            break;
        }
        relative.sort_unstable();
        relative.dedup();
        if !uneven && count == Some(relative.len()) {
            continue;
        }
        for place in places() {
            let inside = inside(cuts, place, each.len);
            let missing =
                relative.iter().map(|at| place.start + at).filter(|at| inside.binary_search(at).is_err());
            fresh.extend(missing.map(|at| (place.view, at)));
        }
        if fresh.len() > LIMIT {
            break;
        }
    }
    work
}

impl Cells {
    fn tell(&mut self, program: &mut Program<'_>) -> Result<(), Kind> {
        for at in 0..program.moves.len() {
            let each = &mut program.moves[at];
            each.first_piece = self.pieces as u32;
            let places = [each.sources.clone(), each.dests.clone()];
            let len = each.len;
            for place in places.into_iter().flatten() {
                let place = &mut program.locations[place as usize];
                let cells = self.within(place.view, place.start..place.start + len).expect("cut there");
                place.cell = cells.start;
                program.moves[at].pieces = cells.end - cells.start;
            }
            self.pieces += program.moves[at].pieces as usize;
            if self.pieces > LIMIT {
                return Err(Kind::TooLarge { what: "pieces of accesses", limit: LIMIT as u64 });
            }
        }
        Ok(())
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.first.last().map_or(0, |&behind| behind as usize)
    }

    /// The cells of a range that begins and ends at cuts.
    pub fn within(&self, view: View, bytes: Range<u64>) -> Option<Range<u32>> {
        let cuts = &self.cuts[view.index()];
        let at = |byte: u64| cuts.binary_search(&byte).ok().map(|at| self.first[view.index()] + at as u32);
        Some(at(bytes.start)?..at(bytes.end)?)
    }

    /// All cells of a view.
    pub fn of(&self, view: View) -> Range<u32> {
        self.first[view.index()]..self.first[view.index() + 1]
    }

    /// A cell's view and bytes.
    pub fn place(&self, cell: u32) -> (View, Range<u64>) {
        let view = self.first.partition_point(|&first| first <= cell) - 1;
        let at = (cell - self.first[view]) as usize;
        (View(view as u32), self.cuts[view][at]..self.cuts[view][at + 1])
    }

    /// Whether packets and plain data share bytes of any scratch.
    pub fn mixed(&self) -> bool {
        self.mixed.contains(&true)
    }

    /// The cells of plain scratch that share bytes with a cell of packets, and the other way round: packets of some bytes
    /// take twice as many, from twice as far.
    pub fn shared(&self, view: View, cell: u32) -> Range<u32> {
        let Some(other) = view.sharing() else { return 0..0 };
        if !self.mixed[view.rank().index()] {
            return 0..0;
        }
        let at = (cell - self.first[view.index()]) as usize;
        let (start, end) = (self.cuts[view.index()][at], self.cuts[view.index()][at + 1]);
        let bytes = if view.packets() { 2 * start..2 * end } else { start / 2..end.div_ceil(2) };
        let (first, cuts) = (self.first[other.index()], &self.cuts[other.index()]);
        let cells = cuts.len().saturating_sub(1);
        let from = cuts.partition_point(|&cut| cut <= bytes.start).saturating_sub(1).min(cells);
        let to = cuts.partition_point(|&cut| cut < bytes.end).min(cells).max(from);
        first + from as u32..first + to as u32
    }

    /// For people.
    pub fn region(&self, cell: u32) -> Region {
        let (view, bytes) = self.place(cell);
        self.region_of(view, bytes)
    }

    /// Some bytes of a view, for people.
    pub fn region_of(&self, view: View, bytes: Range<u64>) -> Region {
        let buffer = match view.kind() {
            View::INPUT if self.inplace => BufferType::Output,
            View::INPUT => BufferType::Input,
            View::OUTPUT => BufferType::Output,
            _ => BufferType::Scratch,
        };
        let chunks = |at: u64| at as f64 / self.chunk as f64;
        Region {
            rank: view.rank(),
            buffer,
            packets: view.packets(),
            chunks: chunks(bytes.start)..chunks(bytes.end),
        }
    }
}

/// The bytes of a rank's whole buffer.
pub(super) fn buffer(program: &Program<'_>, rank: Rank, buffer: BufferType) -> (View, Range<u64>) {
    let home = home(program.plan, rank, buffer);
    let start = home.base * program.chunk;
    (home.view, start..start + program.plan.gpus[rank.index()].chunks(buffer) * program.chunk)
}

/// For each rank, whether its scratch is used as packets and plain in the same bytes.
fn mixed(program: &Program<'_>) -> Vec<bool> {
    let ranks = program.plan.gpus.len();
    let (mut plain, mut packets) = (vec![Vec::new(); ranks], vec![Vec::new(); ranks]);
    for each in &program.moves {
        for place in program.sources(each).iter().chain(program.dests(each)) {
            let (rank, bytes) = (place.view.rank().index(), (place.start, place.start + each.len));
            if place.view.packets() {
                packets[rank].push((2 * bytes.0, 2 * bytes.1));
            } else if !place.view.callers() {
                plain[rank].push(bytes);
            }
        }
    }
    (0..ranks).map(|rank| overlap(&mut plain[rank], &mut packets[rank])).collect()
}

/// Whether some range of the one overlaps some of the other.
fn overlap(left: &mut [(u64, u64)], right: &mut [(u64, u64)]) -> bool {
    left.sort_unstable();
    right.sort_unstable();
    // For each start on the left, how far ranges reach that began before.
    let mut reach = Vec::with_capacity(left.len());
    let mut far = 0;
    for &(_, end) in left.iter() {
        far = far.max(end);
        reach.push(far);
    }
    right.iter().any(|&(start, end)| {
        let begun = left.partition_point(|&(other, _)| other < end);
        begun > 0 && reach[begun - 1] > start
    })
}
