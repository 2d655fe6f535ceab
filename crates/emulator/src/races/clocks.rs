//! What a thread knows of others: vector clocks, as trees that share their equal parts.
//!
//! Every thread of a kernel has an identifier, and counts its releases: its time. A clock has, for every thread, the time up to which
//! that thread's accesses are ordered before what has the clock. The tree's levels are grids, blocks, warps and lanes; a part whose
//! threads have one time, as behind a barrier, is one number.

use std::sync::Arc;

pub(crate) type Id = u32;
pub(crate) type Time = u32;

/// The time of threads that have ended.
pub(crate) const ENDED: Time = Time::MAX;
pub(crate) const LANES: u32 = 32;

/// The identifiers of a grid: `blocks` times `per_block` of them, from `start`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Range {
    pub start: Id,
    pub blocks: u32,
    /// A multiple of [`LANES`].
    pub per_block: u32,
}

impl Range {
    pub(crate) fn end(self) -> Id {
        self.start + self.blocks * self.per_block
    }
}

/// Times of some threads.
#[derive(Debug, Clone)]
enum Tree {
    /// All have this.
    All(Time),
    Parts(Arc<[Tree]>),
    Lanes(Arc<[Time; LANES as usize]>),
}

use Tree::{All, Lanes, Parts};

impl Tree {
    fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (All(a), All(b)) => a == b,
            (Parts(a), Parts(b)) => Arc::ptr_eq(a, b),
            (Lanes(a), Lanes(b)) => Arc::ptr_eq(a, b),
            _ => false,
        }
    }

    fn parts(parts: Vec<Tree>) -> Self {
        match parts[0] {
            All(time) if parts.iter().all(|part| matches!(part, All(other) if *other == time)) => All(time),
            _ => Parts(parts.into()),
        }
    }

    fn lanes(lanes: [Time; LANES as usize]) -> Self {
        if lanes.iter().all(|time| *time == lanes[0]) { All(lanes[0]) } else { Lanes(Arc::new(lanes)) }
    }

    fn join(&self, other: &Self) -> Self {
        match (self, other) {
            _ if self.is_same(other) => self.clone(),
            (All(ENDED), _) | (_, All(0)) => self.clone(),
            (_, All(ENDED)) | (All(0), _) => other.clone(),
            (All(a), All(b)) => All(*a.max(b)),
            (Parts(a), Parts(b)) => {
                let parts: Vec<Tree> = a.iter().zip(&**b).map(|(a, b)| a.join(b)).collect();
                let is = |of: &[Tree]| parts.iter().zip(of).all(|(part, old)| part.is_same(old));
                match (is(a), is(b)) {
                    (true, _) => self.clone(),
                    (_, true) => other.clone(),
                    _ => Self::parts(parts),
                }
            }
            (Lanes(a), Lanes(b)) => {
                let lanes = std::array::from_fn(|lane| a[lane].max(b[lane]));
                match (lanes == **a, lanes == **b) {
                    (true, _) => self.clone(),
                    (_, true) => other.clone(),
                    _ => Self::lanes(lanes),
                }
            }
            (Parts(parts), all) | (all, Parts(parts)) => {
                Self::parts(parts.iter().map(|part| part.join(all)).collect())
            }
            (Lanes(lanes), All(time)) | (All(time), Lanes(lanes)) => {
                Self::lanes(lanes.map(|lane| lane.max(*time)))
            }
        }
    }

    /// The time of the thread at this place; a tree's parts have the size that divides its own.
    fn time(&self, block: usize, warp: usize, lane: usize) -> Time {
        let mut of = self;
        for at in [block, warp] {
            match of {
                Parts(parts) => of = &parts[at],
                All(time) => return *time,
                Lanes(lanes) => return lanes[lane],
            }
        }
        match of {
            Lanes(lanes) => lanes[lane],
            All(time) => *time,
            Parts(_) => 0,
        }
    }

    /// As many parts as said, whatever they are.
    fn split(&self, count: usize) -> Vec<Tree> {
        match self {
            Parts(parts) => parts.to_vec(),
            all => vec![all.clone(); count],
        }
    }
}

#[derive(Debug, Clone)]
struct Grid {
    range: Range,
    tree: Tree,
}

/// A clock. Threads that it does not mention have the time 0: nothing of them is known.
#[derive(Debug, Clone, Default)]
pub(crate) struct Clock(Option<Arc<Vec<Grid>>>);

impl Clock {
    fn grids(&self) -> &[Grid] {
        self.0.as_deref().map_or(&[], Vec::as_slice)
    }

    pub(crate) fn is_same(&self, other: &Self) -> bool {
        match (&self.0, &other.0) {
            (Some(a), Some(b)) => Arc::ptr_eq(a, b),
            (a, b) => a.is_none() && b.is_none(),
        }
    }

    fn find(&self, id: Id) -> Result<usize, usize> {
        let at = self.grids().partition_point(|grid| grid.range.end() <= id);
        if self.grids().get(at).is_some_and(|grid| grid.range.start <= id) { Ok(at) } else { Err(at) }
    }

    /// The time up to which the thread is known.
    pub(crate) fn time(&self, id: Id) -> Time {
        let Ok(at) = self.find(id) else { return 0 };
        let Grid { range, tree } = &self.grids()[at];
        let (block, within) = ((id - range.start) / range.per_block, (id - range.start) % range.per_block);
        tree.time(block as usize, (within / LANES) as usize, (within % LANES) as usize)
    }

    /// Adds what the other knows.
    pub(crate) fn join(&mut self, other: &Self) {
        if self.is_same(other) || other.0.is_none() {
            return;
        }
        if self.0.is_none() {
            self.clone_from(other);
            return;
        }
        let (mut a, mut b) = (self.grids().iter().peekable(), other.grids().iter().peekable());
        let mut all: Vec<Grid> = Vec::with_capacity(a.len().max(b.len()) + 1);
        loop {
            let next = match (a.peek(), b.peek()) {
                (None, None) => break,
                (Some(_), None) => a.next(),
                (None, Some(_)) => b.next(),
                (Some(x), Some(y)) => {
                    if x.range.start <= y.range.start {
                        a.next()
                    } else {
                        b.next()
                    }
                }
            };
            let Some(next) = next else { break };
            push(&mut all, next.clone());
        }
        let is = |of: &Self| {
            all.len() == of.grids().len()
                && all.iter().zip(of.grids()).all(|(a, b)| a.range == b.range && a.tree.is_same(&b.tree))
        };
        if is(other) {
            self.clone_from(other);
        } else if !is(self) {
            self.0 = Some(Arc::new(all));
        }
    }

    fn set(&mut self, range: Range, tree: impl FnOnce(&Tree) -> Tree) {
        let mut all = self.grids().to_vec();
        let at = all.partition_point(|grid| grid.range.end() <= range.start);
        match all.get(at) {
            Some(grid) if grid.range == range => all[at].tree = tree(&grid.tree),
            // Ended, with others.
            Some(grid) if grid.range.start <= range.start => return,
            _ => all.insert(at, Grid { range, tree: tree(&All(0)) }),
        }
        let mut joined = Vec::with_capacity(all.len());
        all.into_iter().for_each(|grid| push(&mut joined, grid));
        self.0 = Some(Arc::new(joined));
    }

    /// All threads of the grid have ended, and are known.
    pub(crate) fn end(&mut self, range: Range) {
        self.set(range, |_| All(ENDED));
    }

    /// The thread is known up to this time.
    pub(crate) fn set_thread(&mut self, range: Range, id: Id, time: Time) {
        let (block, within) = ((id - range.start) / range.per_block, (id - range.start) % range.per_block);
        self.set(range, |tree| {
            let mut blocks = tree.split(range.blocks as usize);
            let mut warps = blocks[block as usize].split((range.per_block / LANES) as usize);
            let warp = &mut warps[(within / LANES) as usize];
            let mut lanes = match warp {
                Lanes(lanes) => **lanes,
                All(time) => [*time; LANES as usize],
                Parts(_) => [0; LANES as usize],
            };
            lanes[(within % LANES) as usize] = time;
            *warp = Tree::lanes(lanes);
            blocks[block as usize] = Tree::parts(warps);
            Tree::parts(blocks)
        });
    }

    /// All lanes of these warps, from `warp` of a block, are known up to this time.
    pub(crate) fn set_warps(&mut self, range: Range, block: u32, warp: u32, count: u32, time: Time) {
        self.set(range, |tree| {
            let mut blocks = tree.split(range.blocks as usize);
            let mut warps = blocks[block as usize].split((range.per_block / LANES) as usize);
            warps[warp as usize..(warp + count) as usize].iter_mut().for_each(|warp| *warp = All(time));
            blocks[block as usize] = Tree::parts(warps);
            Tree::parts(blocks)
        });
    }
}

/// Appends a grid that starts behind the others, or is the last one's, or lies in it. Neighbours that have ended become one.
fn push(all: &mut Vec<Grid>, next: Grid) {
    let Some(last) = all.last_mut() else { return all.push(next) };
    let has_ended = |grid: &Grid| matches!(grid.tree, All(ENDED));
    if last.range == next.range {
        last.tree = last.tree.join(&next.tree);
    } else if next.range.end() <= last.range.end() && has_ended(last) {
        // Known as ended already.
    } else if next.range.start <= last.range.end() && has_ended(last) && has_ended(&next) {
        let blocks = (next.range.end() - last.range.start) / LANES;
        last.range = Range { start: last.range.start, blocks, per_block: LANES };
        return absorb(all);
    } else if next.range.start < last.range.end() {
        // A larger range that has ended begins with the last one.
        *last = next;
        return absorb(all);
    } else {
        all.push(next);
    }
    absorb(all);
}

/// Joins the last two, if both have ended and lie side by side.
fn absorb(all: &mut Vec<Grid>) {
    while let [.., a, b] = &all[..] {
        if !matches!((&a.tree, &b.tree), (All(ENDED), All(ENDED))) || a.range.end() < b.range.start {
            return;
        }
        let end = a.range.end().max(b.range.end());
        let range = Range { start: a.range.start, blocks: (end - a.range.start) / LANES, per_block: LANES };
        all.pop();
        if let Some(last) = all.last_mut() {
            last.range = range;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Clock, ENDED, Range};

    const A: Range = Range { start: 0, blocks: 2, per_block: 96 };
    const B: Range = Range { start: 192, blocks: 3, per_block: 192 };

    #[test]
    fn a_thread_is_known_alone() {
        let mut clock = Clock::default();
        clock.set_thread(B, 192 + 192 + 33, 7);
        assert_eq!([415, 416, 417, 418, 0, 800].map(|id| clock.time(id)), [0, 0, 7, 0, 0, 0]);
    }

    #[test]
    fn a_join_is_the_maximum_and_shares() {
        let (mut a, mut b) = (Clock::default(), Clock::default());
        a.set_thread(A, 5, 3);
        a.set_warps(B, 1, 0, 2, 4);
        b.set_thread(A, 5, 2);
        b.set_thread(B, 192 + 192 + 1, 9);
        let before = a.clone();
        a.join(&before.clone());
        assert!(a.is_same(&before));
        a.join(&b);
        assert_eq!([5, 384, 385, 384 + 63, 384 + 64].map(|id| a.time(id)), [3, 4, 9, 4, 0]);
        let all = a.clone();
        a.join(&b);
        assert!(a.is_same(&all), "nothing new");
        b.join(&a);
        assert!(b.is_same(&a), "all of the other");
    }

    #[test]
    fn ended_grids_become_one() {
        let (mut a, mut b) = (Clock::default(), Clock::default());
        a.end(A);
        b.end(B);
        b.set_thread(A, 1, 1);
        a.join(&b);
        assert_eq!(a.grids().len(), 1);
        assert_eq!([0, 191, 192, 767, 768].map(|id| a.time(id)), [ENDED, ENDED, ENDED, ENDED, 0]);
        // Parts of what has ended change nothing.
        a.set_thread(B, 200, 1);
        let mut c = Clock::default();
        c.set_thread(B, 200, 4);
        c.join(&a);
        assert_eq!((c.grids().len(), c.time(200), c.time(1)), (1, ENDED, ENDED));
        a.join(&c);
        assert_eq!(a.time(300), ENDED);
    }
}
