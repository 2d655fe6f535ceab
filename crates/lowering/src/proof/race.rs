//! Whether memory that peers reach is used by one at a time.

use super::lifetime::lifetime;
use crate::{
    analysis::Analysis,
    decisions::{Decisions, Slot},
    error::{Finding, FindingKind},
    faults::Fault,
    graph::{Graph, Op},
    hash::HashMap,
    ids::{StoreId, TokenId},
    lowered::{ALIGNMENT, comm},
    op::{Kind, ResultMemory},
    types::{CommReq, Roles},
};

/// The most accesses of slots that are compared with each other.
const MAX_ACCESSES: usize = 1 << 16;
/// The most ranks that are simulated: what three ranks do to each other, more do too.
const MAX_RANKS: usize = 3;

/// What is wrong with the slots of decisions: each must be of a storage that asks for it, in its heap, large enough, and every
/// storage that asks must have one.
pub fn slots(graph: &Graph, decisions: &Decisions) -> Vec<Finding> {
    let asks = |value: &crate::Value| matches!(value.class, crate::Class::Comm(_));
    if decisions.slots.is_empty() && !graph.values.iter().any(asks) {
        return Vec::new();
    }
    let analysis = graph.analyse();
    let mut findings = Vec::new();
    let mut found: HashMap<StoreId, usize> = HashMap::default();
    let by_name: HashMap<&str, usize> =
        graph.values.iter().enumerate().map(|(index, value)| (value.name.as_str(), index)).collect();
    for slot in &decisions.slots {
        let value = by_name.get(slot.value.as_str()).map(|index| crate::ValueId::from(*index));
        let Some((root, req)) = value.and_then(|value| comm(graph, &analysis, value)) else {
            let text = format!("a slot for {}, which asks for none", slot.value);
            findings.push(Finding::new(FindingKind::Slot, text).value(&slot.value));
            continue;
        };
        let store = analysis.store[root.index()].expect("has a root");
        if let Some(text) = misplaced(graph, &analysis, store, req) {
            findings.push(Finding::new(FindingKind::Slot, text).value(&slot.value));
        }
        let most = analysis.bytes(graph, store);
        let most = most.and_then(|bytes| bytes.range(&graph.syms).max);
        let fits = most.is_some_and(|most| u64::try_from(most).is_ok_and(|most| slot.bytes >= most));
        let aligned = slot.offset.is_multiple_of(ALIGNMENT) && slot.offset.checked_add(slot.bytes).is_some();
        let name = |place: usize| graph.ops[place].name.as_str();
        let life = lifetime(graph, &analysis, store).map(|(first, last)| (name(first), name(last)));
        let is_life = life == Some((&slot.first, &slot.last));
        if graph.name(root) != slot.value || req.domain != slot.domain || !fits || !aligned || !is_life {
            let text = format!(
                "{} bytes at {} from {} to {}, for {most:?} bytes in use in {life:?}",
                slot.bytes, slot.offset, slot.first, slot.last
            );
            let numbers = [slot.bytes as i64, slot.offset as i64];
            findings.push(Finding::new(FindingKind::Slot, text).value(&slot.value).numbers(numbers));
        }
        *found.entry(store).or_default() += 1;
    }
    for (index, storage) in analysis.stores.iter().enumerate() {
        let asks = matches!(graph.value(storage.root).class, crate::Class::Comm(_));
        let count = found.get(&StoreId::from(index)).copied().unwrap_or(0);
        if asks && count != 1 {
            let text = format!("{count} slots for one storage");
            findings.push(Finding::new(FindingKind::Slot, text).value(graph.name(storage.root)));
        }
    }
    findings
}

/// Why a storage is not what the calls need that find their tensors in it: each must be of a group that it asks for, whose ranks
/// share its heap, and do no more than its role says.
fn misplaced(graph: &Graph, analysis: &Analysis, store: StoreId, req: &CommReq) -> Option<String> {
    let shares = |name: &String| graph.group(name).is_some_and(|group| group.domain() == req.domain);
    if let Some(name) = req.groups.iter().find(|name| !shares(name)) {
        return Some(format!("the group {name} does not share the heap of {}", req.domain));
    }
    let lies = |value: &crate::ValueId| analysis.store[value.index()] == Some(store);
    let values = || analysis.values(store).iter();
    let uses = values().flat_map(|value| analysis.uses(*value)).map(|op| graph.op(*op));
    let makes = values().filter_map(|value| analysis.op_of(graph, *value));
    let is_call = |op: &&Op| matches!(op.kind, Kind::Sync { .. } | Kind::Fused { .. });
    uses.chain(makes).filter(is_call).find_map(|op| {
        let group = op.kind.group()?;
        let (reads, writes) = (op.args.iter().any(lies), op.outs.iter().any(lies));
        let may = match req.roles {
            Roles::In => !writes,
            Roles::Out => !reads,
            Roles::InOut => true,
        };
        let is_asked = req.groups.iter().any(|name| name == group);
        (!is_asked || !may).then(|| {
            let (name, roles, groups) = (&op.name, req.roles, &req.groups);
            format!("{name} of {group} reads it: {reads}, writes it: {writes}; it asks for {roles:?} of {groups:?}")
        })
    })
}

/// The knowledge of a stream: for each stream of each rank, how far it is known to have come.
type Clock = Vec<u32>;

/// An access of a slot's bytes in the memory of one rank.
struct Access<'p> {
    op: &'p str,
    domain: &'p str,
    bytes: std::ops::Range<u64>,
    /// The rank that has the memory.
    owner: usize,
    writes: bool,
    stream: usize,
    clock: Clock,
}

/// Pairs of accesses of the same bytes, one of them a write, that no order keeps apart.
///
/// Every rank runs the graph, on a stream for what it computes and another for collectives that were started. A rank reads
/// the slots of all ranks of a group in the group's calls. What orders ranks: a call ends when all ranks have come to it,
/// and when all have read what they read. Each access gets a vector clock; two that do not know of each other race.
pub fn detect(graph: &Graph, decisions: &Decisions) -> Vec<Finding> {
    let by_value: HashMap<&str, &Slot> =
        decisions.slots.iter().map(|slot| (slot.value.as_str(), slot)).collect();
    if by_value.is_empty() {
        return Vec::new();
    }
    let analysis = graph.analyse();
    let largest = graph.groups.iter().map(|group| group.size as usize).max().unwrap_or(1);
    let ranks = largest.clamp(1, MAX_RANKS);
    let streams = 2 * ranks;
    // Stream 2r computes on rank r, stream 2r + 1 carries its collectives.
    let mut clocks: Vec<Clock> = vec![vec![0; streams]; streams];
    let mut ends: HashMap<TokenId, Vec<Clock>> = HashMap::default();
    let mut accesses: Vec<Access<'_>> = Vec::new();
    let slot_of = |value| Some(*by_value.get(graph.name(analysis.root(value)?))?);
    for op in &graph.ops {
        let is_start = matches!(op.kind, Kind::Start { .. });
        if let Kind::Wait { tokens } = &op.kind {
            for clock in tokens.iter().filter_map(|token| ends.get(token)) {
                (0..ranks).for_each(|rank| join(&mut clocks[2 * rank], &clock[rank]));
            }
            continue;
        }
        let is_call = op.kind.group().is_some();
        let stream = |rank: usize| 2 * rank + usize::from(is_start);
        for rank in 0..ranks {
            if is_start {
                let issued = clocks[2 * rank].clone();
                join(&mut clocks[2 * rank + 1], &issued);
            }
            clocks[stream(rank)][stream(rank)] += 1;
        }
        if is_call {
            meet(&mut clocks, ranks, stream);
            (0..ranks).for_each(|rank| clocks[stream(rank)][stream(rank)] += 1);
        }
        let touched = touched(op, slot_of);
        for (rank, owner) in (0..ranks).flat_map(|rank| (0..ranks).map(move |owner| (rank, owner))) {
            for (slot, writes) in &touched {
                if rank != owner && (*writes || !is_call) {
                    continue; // only a call's inputs are read by others
                }
                accesses.push(Access {
                    op: &op.name,
                    domain: &slot.domain,
                    bytes: slot.offset..slot.offset.saturating_add(slot.bytes),
                    owner,
                    writes: *writes,
                    stream: stream(rank),
                    clock: clocks[stream(rank)].clone(),
                });
            }
        }
        if is_call {
            meet(&mut clocks, ranks, stream);
        }
        if let Kind::Start { token, .. } = &op.kind {
            ends.insert(*token, (0..ranks).map(|rank| clocks[2 * rank + 1].clone()).collect());
        }
        if accesses.len() > MAX_ACCESSES {
            let text = format!("more than {MAX_ACCESSES} accesses of slots");
            return vec![Finding::new(FindingKind::Race, text)];
        }
    }
    let shared = shared_at_once(graph, decisions);
    races(&accesses).into_iter().chain(shared).collect()
}

/// Two storages in the same bytes, one of which is written while the other still has a reader to come.
fn shared_at_once(graph: &Graph, decisions: &Decisions) -> Vec<Finding> {
    if Fault::ProofIsBlind.is_present() {
        return Vec::new();
    }
    let analysis = graph.analyse();
    let values: HashMap<&str, usize> =
        graph.values.iter().enumerate().map(|(index, value)| (value.name.as_str(), index)).collect();
    let life = |slot| {
        let slot: &Slot = slot;
        let value = *values.get(slot.value.as_str())?;
        let (first, last) = lifetime(graph, &analysis, analysis.store[value]?)?;
        Some((slot, first, last))
    };
    let mut lives: Vec<(&Slot, usize, usize)> = decisions.slots.iter().filter_map(life).collect();
    lives.sort_by_key(|(_, first, _)| *first);
    let (mut findings, mut now) = (Vec::new(), Vec::<(&Slot, usize)>::new());
    for (a, first, last) in lives {
        now.retain(|(_, end)| first <= *end);
        for (b, _) in &now {
            let apart = a.domain != b.domain
                || a.offset.saturating_add(a.bytes) <= b.offset
                || b.offset.saturating_add(b.bytes) <= a.offset;
            if !apart {
                let text = format!("{} and {} share bytes, and are in use at once", a.value, b.value);
                findings.push(Finding::new(FindingKind::Slot, text).value(&a.value).value(&b.value));
            }
        }
        now.push((a, last));
    }
    findings
}

/// The slots that an operation reads (`false`) and writes (`true`).
fn touched<'p>(op: &Op, slot_of: impl Fn(crate::ValueId) -> Option<&'p Slot>) -> Vec<(&'p Slot, bool)> {
    if matches!(op.kind, Kind::View { .. }) {
        return Vec::new();
    }
    let reads = op.args.iter().filter_map(|arg| Some((slot_of(*arg)?, false)));
    let is_written = |index: usize| !matches!(op.kind.result_memory(index), ResultMemory::Alias(_));
    let writes = op.outs.iter().enumerate().filter(|(index, _)| is_written(*index));
    reads.chain(writes.filter_map(|(_, out)| Some((slot_of(*out)?, true)))).collect()
}

fn join(clock: &mut Clock, other: &Clock) {
    clock.iter_mut().zip(other).for_each(|(own, other)| *own = (*own).max(*other));
}

/// All ranks come to one point, and know what each of them did before.
fn meet(clocks: &mut [Clock], ranks: usize, stream: impl Fn(usize) -> usize) {
    let mut all = clocks[stream(0)].clone();
    (1..ranks).for_each(|rank| join(&mut all, &clocks[stream(rank)]));
    (0..ranks).for_each(|rank| join(&mut clocks[stream(rank)], &all));
}

fn races(accesses: &[Access<'_>]) -> Vec<Finding> {
    let mut findings: Vec<Finding> = Vec::new();
    // The accesses to each rank's memory, without those that a later access covers and knows of. An access that does not know of a covered
    // one does not know of the covering one either, so it is enough to compare it with that.
    let mut recent: HashMap<(&str, usize), Vec<&Access<'_>>> = HashMap::default();
    for a in accesses {
        let recent = recent.entry((a.domain, a.owner)).or_default();
        recent.retain(|b| {
            let overlap = a.bytes.start < b.bytes.end && b.bytes.start < a.bytes.end;
            // The later one must know how far the earlier one's stream had come.
            let after = a.clock[b.stream] >= b.clock[b.stream];
            let known = after || b.clock[a.stream] >= a.clock[a.stream];
            if overlap && (a.writes || b.writes) && !known && a.op != b.op {
                let text = format!("{} and {} touch the same bytes in no order", b.op, a.op);
                let finding = Finding::new(FindingKind::Race, text).op(b.op).op(a.op);
                if !findings.contains(&finding) {
                    findings.push(finding.numbers([]));
                }
            }
            let covers = a.bytes.start <= b.bytes.start && b.bytes.end <= a.bytes.end;
            !(covers && after && (a.writes || !b.writes))
        });
        recent.push(a);
    }
    findings
}
