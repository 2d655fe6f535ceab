//! What threads of kernels know of each other: releases and acquires, fences, barriers, clusters, copies.

use std::{
    cell::Cell,
    collections::{BTreeMap, HashMap},
    ptr,
    sync::{Arc, Mutex},
};

use super::{
    clocks::{Clock, Id, LANES, Time},
    grids::{Grid, Place, SYSTEM, Scope},
    late::Older,
};
use crate::lock;

/// What something knows: which accesses are ordered before it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Knowledge {
    pub all: Clock,
    /// Those behind which a proxy fence lies: of global memory, and of shared memory.
    pub fenced: [Clock; 2],
}

impl Knowledge {
    fn is_same(&self, other: &Self) -> bool {
        self.all.is_same(&other.all) && self.fenced.iter().zip(&other.fenced).all(|(a, b)| a.is_same(b))
    }

    pub(crate) fn join(&mut self, other: &Self) {
        self.all.join(&other.all);
        self.fenced.iter_mut().zip(&other.fenced).for_each(|(a, b)| a.join(b));
    }

    /// As behind a fence of the whole system, of all proxies.
    pub(super) fn fence(&mut self) {
        self.fenced = [self.all.clone(), self.all.clone()];
    }
}

/// A release that memory carries.
#[derive(Debug, Clone)]
pub(crate) struct Message {
    pub scope: Scope,
    pub from: Place,
    pub knowledge: Arc<Knowledge>,
}

/// What the last `fence.sc` knew: of those with the system's scope, and of all on a GPU.
static FENCES: Mutex<BTreeMap<Option<usize>, Knowledge>> = Mutex::new(BTreeMap::new());

/// A thread.
#[derive(Debug, Clone)]
pub(super) struct Lane {
    pub time: Time,
    /// The copies it has begun.
    pub copies: Time,
    pub known: Knowledge,
    /// What the grid could know before its threads began.
    pub origin: Knowledge,
    /// What the last fence of each scope releases.
    pub fences: [Option<Arc<Knowledge>>; 4],
    /// What relaxed loads have seen, and a fence of this scope acquires.
    pub observed: [Knowledge; 4],
    /// Arrivals at the cluster's barrier.
    arrivals: usize,
    is_over: bool,
}

/// What the blocks of a cluster have released at its barrier, by parity.
#[derive(Default)]
pub(crate) struct ClusterOrder {
    phases: [(usize, Knowledge); 2],
}

/// A block that runs, on this thread of the operating system.
pub(crate) struct Block {
    pub(super) grid: Arc<Grid>,
    index: u32,
    pub(super) place: Place,
    /// The number of the thread that runs.
    running: Box<Cell<u32>>,
    pub(super) lanes: Vec<Lane>,
    barriers: HashMap<usize, Knowledge>,
    cluster: Option<Arc<Mutex<ClusterOrder>>>,
    /// What its threads know at their start, and what they wait for by `griddepcontrol.wait`.
    start: Knowledge,
    ahead: Knowledge,
    /// Both, of a thread that has done nothing in between.
    behind_wait: Option<Arc<Knowledge>>,
    /// What the last strong load returns in place of what is there.
    pub(super) older: Older,
    /// Whether its last strong store comes before one that is there already.
    pub(super) is_lost: bool,
}

thread_local! {
    static BLOCK: Cell<*mut Block> = const { Cell::new(ptr::null_mut()) };
}

/// The block of this thread.
pub(super) fn with<R>(function: impl FnOnce(&mut Block) -> R) -> Option<R> {
    let block = BLOCK.get();
    // SAFETY: set while the block runs, by its thread alone; the functions passed here do not call this one.
    unsafe { block.as_mut() }.map(function)
}

impl Block {
    /// `start` is what all its threads know, and `ahead` what they do behind `griddepcontrol.wait`.
    pub(crate) fn new(
        grid: &Arc<Grid>,
        index: u32,
        start: &Knowledge,
        ahead: &Knowledge,
        cluster: Option<Arc<Mutex<ClusterOrder>>>,
    ) -> Self {
        let threads: u32 = grid.dimensions[1].iter().product();
        // The end of what is ahead is a fence of the system.
        let fence = Some(Arc::new(start.clone()));
        let lane = Lane {
            time: 1,
            copies: 0,
            known: start.clone(),
            origin: start.clone(),
            fences: std::array::from_fn(|_| fence.clone()),
            observed: Default::default(),
            arrivals: 0,
            is_over: false,
        };
        Self {
            grid: grid.clone(),
            index,
            place: grid.place(grid.range.start + index * grid.range.per_block),
            running: Box::default(),
            lanes: vec![lane; threads as usize],
            barriers: HashMap::new(),
            cluster,
            start: start.clone(),
            ahead: ahead.clone(),
            behind_wait: None,
            older: Older::default(),
            is_lost: false,
        }
    }

    /// Where the number of the running thread goes.
    pub(crate) fn running(&self) -> *mut u32 {
        self.running.as_ptr()
    }

    /// It is this thread's block, until another is.
    pub(crate) fn runs(&mut self) {
        BLOCK.set(self);
    }

    /// This thread has no block.
    pub(crate) fn none_runs() {
        BLOCK.set(ptr::null_mut());
    }

    /// What its threads know in the end. The end of a grid is a fence of the system: it acquires what relaxed loads have seen.
    pub(crate) fn known_to_all(&self) -> Knowledge {
        let mut known = self.lanes[0].known.clone();
        let mut last = [const { None }; 5];
        for lane in &self.lanes {
            for (of, last) in std::iter::once(&lane.known).chain(&lane.observed).zip(&mut last) {
                if !last.is_some_and(|last: &Knowledge| last.is_same(of)) {
                    known.join(of);
                    *last = Some(of);
                }
            }
        }
        known
    }

    pub(super) fn current(&self) -> usize {
        self.running.get() as usize
    }

    pub(super) fn warps(&self) -> u32 {
        self.grid.range.per_block / LANES / 3
    }

    /// The identifier of a thread, and those of its copies' writes and reads.
    pub(super) fn ids(&self, thread: usize) -> [Id; 3] {
        let own = self.place.block + thread as u32;
        [own, own + self.warps() * LANES, own + 2 * self.warps() * LANES]
    }

    /// What the running thread releases: what it knows, and what it has done itself.
    pub(super) fn release(&mut self) -> Knowledge {
        let thread = self.current();
        let (id, range) = (self.ids(thread)[0], self.grid.range);
        let lane = &mut self.lanes[thread];
        let mut released = lane.known.clone();
        released.all.set_thread(range, id, lane.time);
        lane.time += 1;
        released
    }

    pub(super) fn fence(&mut self, scope: Scope) {
        let thread = self.current();
        let lane = &mut self.lanes[thread];
        for seen in &mut lane.observed[..=scope] {
            lane.known.join(&std::mem::take(seen));
        }
        let released = Arc::new(self.release());
        self.lanes[thread].fences[..=scope].fill(Some(released));
    }

    /// A `fence.sc`: it is behind those before it of threads that its scope has and whose scope has this one.
    pub(super) fn sequential_fence(&mut self, scope: Scope) {
        let thread = self.current();
        // A fence with the system's scope is in the system's order and in its GPU's, any other in the latter alone.
        let orders = [(scope == SYSTEM).then_some(None), Some(Some(self.grid.device))];
        let mut fences = lock(&FENCES);
        for known in orders.iter().flatten().filter_map(|order| fences.get(order)) {
            self.lanes[thread].known.join(known);
        }
        self.fence(scope);
        for order in orders.into_iter().flatten() {
            if let Some(known) = &self.lanes[thread].fences[scope] {
                fences.entry(order).or_default().join(known);
            }
        }
    }

    /// A proxy fence, for global memory if bit 0 is set, and for shared memory if bit 1 is.
    pub(super) fn proxy_fence(&mut self, spaces: u32) {
        let released = self.release().all;
        let thread = self.current();
        for space in (0..2).filter(|space| spaces >> space & 1 != 0) {
            self.lanes[thread].known.fenced[space] = released.clone();
        }
    }

    pub(super) fn end_thread(&mut self) {
        let thread = self.current();
        self.lanes[thread].is_over = true;
    }

    /// All threads that are left have arrived.
    pub(super) fn barrier(&mut self) {
        self.meet(0, |_, lane| !lane.is_over, self.warps());
    }

    pub(super) fn warp_barrier(&mut self, warp: u32, mask: u32) {
        let first = (warp * LANES) as usize;
        self.meet(first, |thread, _| thread < first + 32 && mask >> (thread - first) & 1 != 0, 1);
    }

    /// Those threads, from the first on, know what each of them does.
    fn meet(&mut self, first: usize, is_there: impl Fn(usize, &Lane) -> bool, warps: u32) {
        let range = self.grid.range;
        let there: Vec<usize> = (first..self.lanes.len().min(first + (warps * LANES) as usize))
            .filter(|&thread| is_there(thread, &self.lanes[thread]))
            .collect();
        let Some(&one) = there.first() else { return };
        let mut known = self.lanes[one].known.clone();
        let (mut last, mut time) = (one, 0);
        for &thread in &there {
            let lane = &self.lanes[thread];
            time = time.max(lane.time);
            if !lane.known.is_same(&self.lanes[last].known) {
                known.join(&lane.known);
                last = thread;
            }
        }
        let are_all = there.len() == (self.lanes.len() - first).min((warps * LANES) as usize);
        if are_all {
            known.all.set_warps(range, self.index, first as u32 / LANES, warps, time);
        } else {
            for &thread in &there {
                known.all.set_thread(range, self.ids(thread)[0], self.lanes[thread].time);
            }
        }
        for thread in there {
            let lane = &mut self.lanes[thread];
            lane.known = known.clone();
            lane.time = if are_all { time + 1 } else { lane.time + 1 };
        }
    }

    pub(super) fn cluster_arrive(&mut self, orders: bool) {
        let released = if orders { self.release() } else { Knowledge::default() };
        let thread = self.current();
        let lane = &mut self.lanes[thread];
        lane.arrivals += 1;
        if let Some(cluster) = &self.cluster {
            let (phase, knowledge) = &mut lock(cluster).phases[lane.arrivals % 2];
            if *phase != lane.arrivals {
                (*phase, *knowledge) = (lane.arrivals, Knowledge::default());
            }
            knowledge.join(&released);
        }
    }

    pub(super) fn cluster_wait(&mut self) {
        let thread = self.current();
        let lane = &mut self.lanes[thread];
        if let Some(cluster) = &self.cluster {
            lane.known.join(&lock(cluster).phases[lane.arrivals % 2].1);
        }
    }

    /// The thread's copies up to this number have read, and have written if not `only_read`.
    fn copies_of(&self, thread: usize, number: Time, only_read: bool) -> Knowledge {
        let mut done = Knowledge::default();
        let [_, writes, reads] = self.ids(thread);
        done.all.set_thread(self.grid.range, reads, number);
        if !only_read {
            done.all.set_thread(self.grid.range, writes, number);
        }
        done
    }

    pub(super) fn copies_done(&mut self, number: Time, only_read: bool) {
        if number != 0 {
            let done = self.copies_of(self.current(), number, only_read);
            let thread = self.current();
            self.lanes[thread].known.join(&done);
        }
    }

    pub(super) fn barrier_arrive(&mut self, barrier: usize) {
        let released = self.release();
        self.barriers.entry(barrier).or_default().join(&released);
    }

    pub(super) fn barrier_complete(&mut self, barrier: usize, thread: u32, number: Time) {
        let done = self.copies_of(thread as usize, number, false);
        self.barriers.entry(barrier).or_default().join(&done);
    }

    pub(super) fn barrier_wait(&mut self, barrier: usize) {
        let thread = self.current();
        if let Some(known) = self.barriers.get(&barrier) {
            self.lanes[thread].known.join(known);
        }
    }

    pub(super) fn grid_wait(&mut self) {
        let thread = self.current();
        let lane = &mut self.lanes[thread];
        if lane.known.is_same(&self.ahead) {
            return;
        }
        lane.origin.join(&self.ahead);
        if !lane.known.is_same(&self.start) {
            lane.known.join(&self.ahead);
            return self.fence(SYSTEM);
        }
        let behind = self.behind_wait.get_or_insert_with(|| {
            let mut both = self.start.clone();
            both.join(&self.ahead);
            Arc::new(both)
        });
        lane.known = Knowledge::clone(behind);
        lane.fences.fill(Some(behind.clone()));
    }
}
