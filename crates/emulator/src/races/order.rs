//! What streams, events and the host order.
//!
//! The end of a grid, stream order and events are fences of the whole system, of all proxies. All threads of the host count as
//! one: what any of them has waited for is ordered before all that is submitted later.

use std::{
    cell::RefCell,
    sync::{Arc, Mutex},
};

use super::{
    access::{Access, CROWD, Missing, READ, RELEASE, Race, STRONG, WRITE},
    grids::{Grid, SYSTEM},
    is_checking, report,
    shadow::{Cell, GRANULE, Locked, Record, WORD, page},
    threads::{Knowledge, Message},
};
use crate::lock;

/// What is known at a point of a stream.
#[derive(Debug, Clone, Default)]
pub(crate) struct Order {
    pub known: Knowledge,
    /// What was known when the last work began, if that is a grid, beside whose end a programmatic one may start.
    beside: Option<Knowledge>,
}

thread_local! {
    /// The order of the stream whose work this thread does; none on threads of the host.
    static ORDER: RefCell<Option<Order>> = const { RefCell::new(None) };
}

static HOST: Mutex<Option<Knowledge>> = Mutex::new(None);

/// What the host knows, for what it submits.
pub(crate) fn host() -> Knowledge {
    if is_checking() { lock(&HOST).clone().unwrap_or_default() } else { Knowledge::default() }
}

/// The order of a node of a graph: behind what launched the graph, and the nodes that it waits for.
pub(crate) fn behind(start: &Order, nodes: Vec<Order>) -> Order {
    if let [one] = &nodes[..] {
        return one.clone();
    }
    let mut all = start.clone();
    for node in &nodes {
        all.known.join(&node.known);
        all.beside = None;
    }
    all
}

/// This thread goes on with another order, of another stream, and leaves its own there.
pub(crate) fn swap(order: &mut Option<Order>) {
    ORDER.with_borrow_mut(|own| std::mem::swap(own, order));
}

/// This thread's order, which work changes, starts from this one.
pub(crate) fn set(order: Order) {
    ORDER.set(Some(order));
}

/// The order behind the work that this thread has done.
pub(crate) fn get() -> Order {
    ORDER.with_borrow(|order| order.clone().unwrap_or_default())
}

/// The work behind knows this: what the host knew when it submitted it, in front of the work itself.
pub(crate) fn submitted(by_host: &Knowledge) {
    ORDER.with_borrow_mut(|order| {
        let order = order.get_or_insert_default();
        order.known.join(by_host);
        if let Some(beside) = &mut order.beside {
            beside.join(by_host);
        }
    });
}

/// A stream's thread, or the host, has waited for what knows this.
pub(crate) fn join(knowledge: &Knowledge) {
    if !is_checking() {
        return;
    }
    ORDER.with_borrow_mut(|order| match order {
        Some(order) => {
            order.known.join(knowledge);
            order.beside = None;
        }
        None => lock(&HOST).get_or_insert_default().join(knowledge),
    });
}

/// What a grid knows at its start, and behind `griddepcontrol.wait`.
pub(crate) fn start(is_programmatic: bool) -> [Knowledge; 2] {
    let order = get();
    let fenced = |mut knowledge: Knowledge| {
        knowledge.fence();
        knowledge
    };
    let start = order.beside.filter(|_| is_programmatic).unwrap_or_else(|| order.known.clone());
    [fenced(start), fenced(order.known)]
}

/// The grid has ended, whose threads have learned this.
pub(crate) fn end(grid: &Grid, start: Knowledge, learned: &Knowledge) {
    ORDER.with_borrow_mut(|order| {
        let order = order.get_or_insert_default();
        order.known.join(learned);
        order.known.all.end(grid.range);
        order.beside = Some(start);
    });
}

/// A copy of the stream: it writes a range, and reads another if there is one.
pub(crate) fn copied(device: usize, to: u64, from: Option<u64>, bytes: usize) {
    if !is_checking() {
        return;
    }
    let grid: Arc<Grid> = Grid::new(None, device, 1, [[1; 3]; 2]);
    let known = get().known;
    let access = |what| Access { id: grid.range.start, time: 1, pc: 0, what };
    if let Some(from) = from {
        of_stream(&known, access(READ), from as usize, bytes, &grid);
    }
    of_stream(&known, access(WRITE), to as usize, bytes, &grid);
    ORDER.with_borrow_mut(|order| {
        let order = order.get_or_insert_default();
        order.known.all.end(grid.range);
        order.beside = None;
    });
}

/// A stream writes a word, by `write`: whoever acquires it knows what the stream knew.
pub(crate) fn write_word(to: u64, write: impl FnOnce()) {
    if !is_checking() {
        return write();
    }
    let grid: Arc<Grid> = Grid::new(None, 0, 1, [[1; 3]; 2]);
    let what = WRITE | STRONG | RELEASE | (SYSTEM as u32) << 16;
    let access = Access { id: grid.range.start, time: 1, pc: 0, what };
    let mut knowledge = get().known;
    knowledge.all.end(grid.range);
    let mut locked = page(to as usize).map(|page| Locked::new(page, to as usize));
    write();
    if let Some(locked) = &mut locked {
        let first = to as usize % GRANULE / WORD;
        for cell in &mut locked.cells()[first..first + 2] {
            *cell = Cell { writer: access.record(0xF, true), ..Cell::default() };
        }
        let mask = 0b11 << first;
        let message =
            Message { scope: SYSTEM, from: grid.place(access.id), knowledge: Arc::new(knowledge.clone()) };
        let (messages, key) = locked.messages();
        let carried = messages.entry(key).or_default();
        carried.iter_mut().for_each(|(of, _)| *of &= !mask);
        carried.retain(|(of, _)| *of != 0);
        carried.push((mask, message));
    }
    drop(locked);
    ORDER.with_borrow_mut(|order| {
        let order = order.get_or_insert_default();
        order.known = knowledge;
        order.beside = None;
    });
}

/// A kernel has released this to the host's memory. The host is taken to look there before whatever it submits next.
pub(crate) fn released_to_host(knowledge: &Knowledge) {
    lock(&HOST).get_or_insert_default().join(knowledge);
}

/// A copy of a stream reads and writes whole ranges, with nobody but its stream's order before it.
fn of_stream(known: &Knowledge, access: Access, at: usize, bytes: usize, grid: &Arc<Grid>) {
    let (end, mut from) = (at + bytes, at);
    while from < end {
        let to = end.min((from / 4096 + 1) * 4096);
        if let Some(page) = page(from) {
            let is_ordered = |record: &Record| {
                record.is_empty() || record.id == CROWD || known.all.time(record.id) >= record.time
            };
            let race = |first: Record, at: usize| {
                report::race(&Race { first, second: access, at, missing: Missing::Edge }, grid);
            };
            let whole =
                (access.is(WRITE) && to - from == 4096).then(|| page.write_whole(access.record(0xF, false)));
            match whole.flatten() {
                Some(first) if !is_ordered(&first) => race(first, from),
                Some(_) => {}
                None => {
                    for granule in (from / GRANULE * GRANULE..to).step_by(GRANULE) {
                        let mut locked = Locked::new(page, granule);
                        for index in 0..GRANULE / WORD {
                            let word = granule + index * WORD;
                            if word + WORD <= from || word >= to {
                                continue;
                            }
                            let cell = &mut locked.cells()[index];
                            let readers = if access.is(WRITE) { &cell.readers[..] } else { &[] };
                            let first = std::iter::once(&cell.writer)
                                .chain(readers)
                                .find(|record| !is_ordered(record));
                            if let Some(first) = first {
                                race(*first, word);
                            }
                            if access.is(WRITE) {
                                *cell = Cell { writer: access.record(0xF, false), ..Cell::default() };
                            } else {
                                cell.readers[0] = access.record(0xF, false);
                            }
                        }
                    }
                }
            }
        }
        from = to;
    }
}
