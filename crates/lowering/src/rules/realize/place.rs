//! Offsets for storages that peers reach: storages that are never in use at once share bytes, whatever their shapes, dtypes
//! and groups.

use std::collections::BTreeMap;

use crate::{
    analysis::Analysis,
    decisions::Slot,
    faults::Fault,
    graph::Graph,
    hash::HashMap,
    ids::{StoreId, TokenId, ValueId},
    lowered::{ALIGNMENT, comm},
    op::Kind,
    types::Class,
};

/// A storage that needs an offset: its bytes, and the first and the last operation that uses them, on any rank.
#[derive(Debug, Clone, Copy)]
struct Life {
    bytes: u64,
    first: usize,
    last: usize,
}

impl Life {
    fn overlaps(&self, other: &Self) -> bool {
        self.first <= other.last && other.first <= self.last
    }
}

/// The key by which storages are placed: the least first.
type Order = fn(&Life) -> (u128, usize);

/// The orders that are tried: by size, by size and length, by length, by begin.
const ORDERS: [Order; 4] = [
    |life| (u128::MAX - u128::from(life.bytes), life.first),
    |life| (u128::MAX - u128::from(life.bytes) * (life.last - life.first + 1) as u128, life.first),
    |life| (u128::MAX - (life.last - life.first) as u128, life.first),
    |life| (life.first as u128, life.last),
];

/// The most storages of a heap whose placement is searched for exactly.
const MAX_EXACT: usize = 16;
/// The most placements that this search looks at.
const MAX_STEPS: usize = 200_000;

/// A slot in its heap for each storage that asks for one.
pub(crate) fn place(graph: &Graph) -> Vec<Slot> {
    if !graph.values.iter().any(|value| matches!(value.class, Class::Comm(_))) {
        return Vec::new();
    }
    let analysis = graph.analyse();
    let in_use = in_use(graph, &analysis);
    let mut heaps: BTreeMap<&str, Vec<(StoreId, Life)>> = BTreeMap::new();
    for (index, storage) in analysis.stores.iter().enumerate() {
        let store = StoreId::from(index);
        let Some((_, req)) = comm(graph, &analysis, storage.root) else { continue };
        let most = analysis.bytes(graph, store).and_then(|bytes| bytes.range(&graph.syms).max);
        let most = most.and_then(|most| u64::try_from(most).ok()?.checked_next_multiple_of(ALIGNMENT));
        if let (Some(bytes), Some((first, last))) = (most, in_use[index]) {
            heaps.entry(&req.domain).or_default().push((store, Life { bytes, first, last }));
        }
    }
    let mut slots = Vec::new();
    for (domain, stores) in heaps {
        let lives: Vec<Life> = stores.iter().map(|(_, life)| *life).collect();
        for ((store, life), offset) in stores.iter().zip(offsets(&lives)) {
            let name = |index: usize| graph.ops[index].name.clone();
            let slot = Slot {
                value: graph.name(analysis.stores[store.index()].root).to_owned(),
                domain: domain.to_owned(),
                offset,
                bytes: life.bytes,
                first: name(life.first),
                last: name(life.last),
            };
            slots.push((*store, slot));
        }
    }
    slots.sort_by_key(|(store, _)| *store);
    slots.into_iter().map(|(_, slot)| slot).collect()
}

/// For each storage the first operation that touches it and the last. A collective that was started touches its storages until
/// its wait.
fn in_use(graph: &Graph, analysis: &Analysis) -> Vec<Option<(usize, usize)>> {
    let mut spans: Vec<Option<(usize, usize)>> = vec![None; analysis.stores.len()];
    let mut flights: HashMap<TokenId, Vec<StoreId>> = HashMap::default();
    for (place, op) in graph.ops.iter().enumerate() {
        let is_shown = |value: &&ValueId| {
            let views = analysis.op_of(graph, **value).is_some_and(|op| matches!(op.kind, Kind::View { .. }));
            !(views && Fault::ViewsAreNone.is_present())
        };
        let values = op.args.iter().chain(&op.outs).filter(is_shown);
        let mut touched: Vec<StoreId> = values.filter_map(|value| analysis.store[value.index()]).collect();
        match &op.kind {
            Kind::Start { token, .. } => drop(flights.insert(*token, touched.clone())),
            Kind::Wait { .. } if Fault::EndsAtStart.is_present() => {}
            Kind::Wait { tokens } => {
                touched.extend(tokens.iter().filter_map(|token| flights.remove(token)).flatten())
            }
            _ => {}
        }
        for store in touched {
            let (_, last) = spans[store.index()].get_or_insert((place, place));
            *last = place;
        }
    }
    for (first, last) in spans.iter_mut().flatten() {
        match () {
            () if Fault::BeginsLate.is_present() => *first = (*first + 1).min(*last),
            () if Fault::EndsEarly.is_present() => *last = (*last - 1).max(*first),
            () if Fault::NeverEnds.is_present() => *last = graph.ops.len() - 1,
            () => {}
        }
    }
    spans
}

/// An offset for each storage. The best of four orders is taken; a heap of few storages for which that is above the lower
/// bound is searched for the least peak.
fn offsets(lives: &[Life]) -> Vec<u64> {
    let best = ORDERS.map(|order| best_fit(lives, order)).into_iter().min_by_key(|(peak, _)| *peak);
    let (peak, offsets) = best.expect("there are four");
    if lives.len() > MAX_EXACT || peak == live_bytes(lives.iter()) {
        return offsets;
    }
    let mut search = Search { lives, offsets: vec![None; lives.len()], peak, best: None, steps: MAX_STEPS };
    search.run((0, 0), 0);
    search.best.unwrap_or(offsets)
}

/// The most bytes that are in use at once: no placement has a lower peak.
fn live_bytes<'l>(lives: impl Iterator<Item = &'l Life> + Clone) -> u64 {
    let at = |time: usize| lives.clone().filter(move |life| life.first <= time && time <= life.last);
    let sum = |time: usize| at(time).fold(0u64, |sum, life| sum.saturating_add(life.bytes));
    lives.clone().map(|life| sum(life.first)).max().unwrap_or(0)
}

/// The peak and the offsets, if storages are placed in an order, each in the smallest gap that it fits.
fn best_fit(lives: &[Life], order: Order) -> (u64, Vec<u64>) {
    let mut queue: Vec<usize> = (0..lives.len()).collect();
    queue.sort_by_key(|index| order(&lives[*index]));
    let (mut offsets, mut done, mut peak) = (vec![0u64; lives.len()], Vec::<usize>::new(), 0u64);
    for index in queue {
        let life = &lives[index];
        let beside = done.iter().filter(|other| lives[**other].overlaps(life));
        let mut taken: Vec<(u64, u64)> = beside
            .map(|other| (offsets[*other], offsets[*other].saturating_add(lives[*other].bytes)))
            .collect();
        taken.sort_unstable();
        let (mut end, mut gap) = (0, None::<(u64, u64)>);
        for (start, stop) in taken {
            let room = start.saturating_sub(end);
            if room >= life.bytes && gap.is_none_or(|(smallest, _)| room < smallest) {
                gap = Some((room, end));
            }
            end = end.max(stop);
        }
        offsets[index] = gap.map_or(end, |(_, offset)| offset);
        peak = peak.max(offsets[index].saturating_add(life.bytes));
        done.push(index);
    }
    (peak, offsets)
}

/// The search for the least peak. In a placement of which no storage can be moved down, each lies at the lowest offset that
/// those at lower offsets leave. So it is enough to place storages by ascending offsets, each at the lowest that is free.
struct Search<'l> {
    lives: &'l [Life],
    offsets: Vec<Option<u64>>,
    /// The least peak so far.
    peak: u64,
    best: Option<Vec<u64>>,
    steps: usize,
}

impl Search<'_> {
    /// Places the rest, at offsets (and of equal offsets: places in the list) from `from` on.
    fn run(&mut self, from: (u64, usize), peak: u64) {
        let rest = || self.lives.iter().zip(&self.offsets).filter(|(_, offset)| offset.is_none());
        if rest().next().is_none() {
            self.peak = peak;
            self.best = Some(self.offsets.iter().copied().flatten().collect());
            return;
        }
        if from.0.saturating_add(live_bytes(rest().map(|(life, _)| life))) >= self.peak {
            return;
        }
        for index in 0..self.lives.len() {
            if self.offsets[index].is_some() || self.steps == 0 {
                continue;
            }
            self.steps -= 1;
            let offset = self.lowest(index);
            let end = offset.saturating_add(self.lives[index].bytes);
            if (offset, index) < from || end >= self.peak {
                continue;
            }
            self.offsets[index] = Some(offset);
            self.run((offset, index + 1), peak.max(end));
            self.offsets[index] = None;
        }
    }

    /// The lowest offset that the placed storages leave for one.
    fn lowest(&self, index: usize) -> u64 {
        let life = &self.lives[index];
        let beside = self.lives.iter().zip(&self.offsets).filter(|(other, _)| other.overlaps(life));
        let mut taken: Vec<(u64, u64)> = beside
            .filter_map(|(other, offset)| Some(((*offset)?, (*offset)?.saturating_add(other.bytes))))
            .collect();
        taken.sort_unstable();
        let mut end = 0u64;
        for (start, stop) in taken {
            if start >= end.saturating_add(life.bytes) {
                break;
            }
            end = end.max(stop);
        }
        end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether every storage from `next` on fits below `peak` units, by trying all offsets.
    fn fits(lives: &[Life], offsets: &mut Vec<u64>, peak: u64) -> bool {
        let Some(life) = lives.get(offsets.len()) else { return true };
        (0..(peak + 1).saturating_sub(life.bytes)).any(|offset| {
            let apart = lives.iter().zip(offsets.iter()).all(|(other, start)| {
                !other.overlaps(life) || offset + life.bytes <= *start || start + other.bytes <= offset
            });
            offsets.push(offset);
            let found = apart && fits(lives, offsets, peak);
            offsets.pop();
            found
        })
    }

    #[test]
    fn no_placement_of_ten_storages_has_a_lower_peak() {
        let mut state = 3u64;
        let mut random = |limit: u64| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) % limit
        };
        let mut improved = 0;
        for round in 0..300 {
            let count = if round % 3 == 0 { 10 } else { 1 + random(10) };
            let life =
                |first: usize, length: u64, bytes| Life { bytes, first, last: first + length as usize };
            let lives: Vec<Life> =
                (0..count).map(|_| life(random(12) as usize, random(6), 1 + random(4))).collect();
            let offsets = offsets(&lives);
            for (a, x) in lives.iter().zip(&offsets) {
                let apart = |(b, y): (&Life, &u64)| {
                    std::ptr::eq(a, b) || !a.overlaps(b) || x + a.bytes <= *y || y + b.bytes <= *x
                };
                assert!(lives.iter().zip(&offsets).all(apart), "{lives:?} at {offsets:?}");
            }
            let peak = lives.iter().zip(&offsets).map(|(life, offset)| offset + life.bytes).max().unwrap();
            let bound = live_bytes(lives.iter());
            assert!(peak >= bound);
            let by_orders = ORDERS.map(|order| best_fit(&lives, order).0).into_iter().min().unwrap();
            improved += u32::from(peak < by_orders);
            assert!(peak == bound || !fits(&lives, &mut Vec::new(), peak - 1), "{lives:?} at {offsets:?}");
        }
        assert!(improved > 0, "no case for which the four orders do not suffice");
    }
}
