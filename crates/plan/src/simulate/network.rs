//! Flows over shared links: their rates, and the times at which they end.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

/// A thing that flows share: a place in the network's list.
pub(super) type ResourceId = u32;
/// Flows with the same resources and cap.
pub(super) type ClassId = u32;

/// A time, or a counter of bytes, in an order of its own; never NaN.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Ordered(pub f64);

impl Eq for Ordered {}

impl PartialOrd for Ordered {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Ordered {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

/// Bytes that may be left of a flow that is done: less than rounding makes of a terabyte.
const ROUNDING: f64 = 1e-3;

#[derive(Debug)]
struct Class {
    resources: Box<[ResourceId]>,
    /// The highest rate of one flow, in bytes per ns.
    cap: f64,
    /// The present rate of each flow.
    rate: f64,
    /// The bytes that a flow has received, at the time `since`, if it is as old as the class: if the class has not been empty since.
    served: f64,
    since: f64,
    /// When `served` has risen to the number, the flow is done. Equal ones in the order in which they began.
    flows: BinaryHeap<Reverse<(Ordered, u64, u64)>>,
    /// Counts the changes of the rate: a completion that was foreseen before the last one is void.
    generation: u32,
    dirty: bool,
}

impl Class {
    fn advance(&mut self, now: f64) {
        self.served += self.rate * (now - self.since);
        self.since = now;
    }
}

/// Max-min fair sharing of resources by classes of flows.
#[derive(Debug, Default)]
pub(super) struct Network {
    /// Bytes per ns.
    capacities: Vec<f64>,
    /// Bytes so far.
    carried: Vec<f64>,
    /// The classes that have flows, for each resource, one for each time that it names the resource.
    users: Vec<Vec<ClassId>>,
    classes: Vec<Class>,
    known: HashMap<(Box<[ResourceId]>, u64), ClassId>,
    dirty: Vec<ClassId>,
    begun: u64,
    fair: Fair,
}

/// A foreseen completion of some flows of a class.
#[derive(Clone, Copy, Debug)]
pub(super) struct Completion {
    pub at: f64,
    pub class: ClassId,
    pub generation: u32,
}

impl Network {
    pub fn new(capacities: Vec<f64>) -> Self {
        let count = capacities.len();
        Network {
            capacities,
            carried: vec![0.0; count],
            users: vec![Vec::new(); count],
            ..Network::default()
        }
    }

    /// Begins a flow of more than zero bytes; `flow` names it when it is done.
    pub fn begin(&mut self, now: f64, resources: &[ResourceId], cap: f64, bytes: f64, flow: u64) {
        let id = self.class(resources, cap);
        let class = &mut self.classes[id as usize];
        if class.flows.is_empty() {
            (class.served, class.since) = (0.0, now);
            class.resources.iter().for_each(|&resource| self.users[resource as usize].push(id));
        } else {
            class.advance(now);
        }
        class.flows.push(Reverse((Ordered(class.served + bytes), self.begun, flow)));
        self.begun += 1;
        class.resources.iter().for_each(|&resource| self.carried[resource as usize] += bytes);
        self.touch(id);
    }

    /// The flows of a completion, if it still stands; they are gone from the network.
    pub fn complete(&mut self, completion: Completion, done: &mut Vec<u64>) {
        let id = completion.class;
        if !self.stands(&completion) {
            return;
        }
        let class = &mut self.classes[id as usize];
        class.advance(completion.at);
        let Some(&Reverse((first, ..))) = class.flows.peek() else { return };
        class.served = class.served.max(first.0);
        while let Some(&Reverse((end, _, flow))) = class.flows.peek() {
            if end.0 > class.served + ROUNDING {
                break;
            }
            class.flows.pop();
            done.push(flow);
        }
        if class.flows.is_empty() {
            for &resource in &class.resources {
                self.users[resource as usize].retain(|&user| user != id);
            }
        }
        self.touch(id);
    }

    /// Gives every class its fair rate after flows have come or gone, and foresees the completions that changed.
    pub fn settle(&mut self, now: f64, mut foresee: impl FnMut(Completion)) {
        while let Some(first) = self.dirty.pop() {
            if !std::mem::take(&mut self.classes[first as usize].dirty) {
                continue;
            }
            self.fair.component(first, &self.classes, &self.users);
            self.fair.share(&self.classes, &self.capacities);
            for (&id, &rate) in self.fair.members.iter().zip(&self.fair.rates) {
                let class = &mut self.classes[id as usize];
                let dirty = std::mem::take(&mut class.dirty) || id == first;
                if !dirty && class.rate == rate {
                    continue;
                }
                class.advance(now);
                class.rate = rate;
                class.generation += 1;
                if let Some(Reverse((end, ..))) = class.flows.peek() {
                    let at = now + ((end.0 - class.served) / rate).max(0.0);
                    foresee(Completion { at, class: id, generation: class.generation });
                }
            }
        }
    }

    /// How often a class's share of its links has been computed: what finding rates costs.
    pub fn shares_computed(&self) -> u64 {
        self.fair.shares_computed
    }

    /// Whether a completion still stands: the class's rate is what it was when it was foreseen.
    pub fn stands(&self, completion: &Completion) -> bool {
        self.classes[completion.class as usize].generation == completion.generation
    }

    /// Bytes that a resource has carried, those of flows that have just begun included.
    pub fn carried(&self, resource: ResourceId) -> f64 {
        self.carried[resource as usize]
    }

    /// How many resources there are.
    pub fn len(&self) -> usize {
        self.capacities.len()
    }

    pub fn capacity(&self, resource: ResourceId) -> f64 {
        self.capacities[resource as usize]
    }

    fn class(&mut self, resources: &[ResourceId], cap: f64) -> ClassId {
        let key = (Box::from(resources), cap.to_bits());
        *self.known.entry(key).or_insert_with_key(|(resources, _)| {
            self.classes.push(Class {
                resources: resources.clone(),
                cap,
                rate: 0.0,
                served: 0.0,
                since: 0.0,
                flows: BinaryHeap::new(),
                generation: 0,
                dirty: false,
            });
            self.classes.len() as ClassId - 1
        })
    }

    fn touch(&mut self, id: ClassId) {
        if !std::mem::replace(&mut self.classes[id as usize].dirty, true) {
            self.dirty.push(id);
        }
    }
}

/// The fair rates of classes that are connected through resources, with the memory that finding them needs.
#[derive(Debug, Default)]
struct Fair {
    /// The classes, the one first that was asked for; it may have no flows any more.
    members: Vec<ClassId>,
    /// For each member, bytes per ns for each of its flows.
    rates: Vec<f64>,
    resources: Vec<ResourceId>,
    /// Marks for the present search, so that nothing needs to be cleared.
    search: u32,
    seen_class: Vec<u32>,
    seen_resource: Vec<u32>,
    /// For each resource, what is left for flows that have no rate yet, and how many there are.
    left: Vec<(f64, f64)>,
    shares_computed: u64,
}

impl Fair {
    fn component(&mut self, first: ClassId, classes: &[Class], users: &[Vec<ClassId>]) {
        self.search += 1;
        self.seen_class.resize(classes.len(), 0);
        self.seen_resource.resize(users.len(), 0);
        self.left.resize(users.len(), (0.0, 0.0));
        self.members.clear();
        self.resources.clear();
        self.members.push(first);
        self.seen_class[first as usize] = self.search;
        let mut at = 0;
        while let Some(&id) = self.members.get(at) {
            at += 1;
            for &resource in &classes[id as usize].resources {
                if std::mem::replace(&mut self.seen_resource[resource as usize], self.search) == self.search {
                    continue;
                }
                self.resources.push(resource);
                for &user in &users[resource as usize] {
                    if std::mem::replace(&mut self.seen_class[user as usize], self.search) != self.search {
                        self.members.push(user);
                    }
                }
            }
        }
    }

    /// Progressive filling: all rates rise together; where a resource is full or a cap is reached, they stay. What others
    /// leave only grows, so all whose cap is below their present share can be settled at once.
    fn share(&mut self, classes: &[Class], capacities: &[f64]) {
        for &resource in &self.resources {
            self.left[resource as usize] = (capacities[resource as usize], 0.0);
        }
        for &id in &self.members {
            let class = &classes[id as usize];
            class.resources.iter().for_each(|&r| self.left[r as usize].1 += class.flows.len() as f64);
        }
        self.rates.clear();
        self.rates.resize(self.members.len(), 0.0);
        let mut open: Vec<usize> = (0..self.members.len())
            .filter(|&at| !classes[self.members[at] as usize].flows.is_empty())
            .collect();
        let mut shares = Vec::new();
        while !open.is_empty() {
            let of = |&r: &ResourceId| self.left[r as usize].0.max(0.0) / self.left[r as usize].1;
            let share = |at: &usize| {
                classes[self.members[*at] as usize].resources.iter().map(of).fold(f64::INFINITY, f64::min)
            };
            shares.clear();
            shares.extend(open.iter().map(share));
            self.shares_computed += open.len() as u64;
            let capped = |at: usize, share: f64| classes[self.members[at] as usize].cap <= share;
            let any_capped = open.iter().zip(&shares).any(|(&at, &share)| capped(at, share));
            // Shares that differ by rounding alone are equal.
            let level = shares.iter().copied().fold(f64::INFINITY, f64::min) * (1.0 + 1e-12);
            let mut share = shares.iter().copied();
            open.retain(|&at| {
                let share = share.next().expect("one for each");
                let class = &classes[self.members[at] as usize];
                if if any_capped { class.cap > share } else { share > level } {
                    return true;
                }
                // A hair above zero, should rounding have used up a resource.
                let rate = share.clamp(class.cap * 1e-9, class.cap);
                let flows = class.flows.len() as f64;
                for &resource in &class.resources {
                    let left = &mut self.left[resource as usize];
                    *left = (left.0 - rate * flows, left.1 - flows);
                }
                self.rates[at] = rate;
                false
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// When each flow is done, the earliest first.
    fn play(capacities: &[f64], flows: &[(f64, &[ResourceId], f64, f64)]) -> Vec<(u64, f64)> {
        let mut network = Network::new(capacities.to_vec());
        let mut foreseen: Vec<Completion> = Vec::new();
        let mut begins: Vec<usize> = (0..flows.len()).collect();
        let mut ends = Vec::new();
        loop {
            foreseen.sort_by(|a, b| b.at.total_cmp(&a.at));
            let begin = begins.first().map_or(f64::INFINITY, |&at| flows[at].0);
            let end = foreseen.last().map_or(f64::INFINITY, |completion| completion.at);
            let now = begin.min(end);
            if now == f64::INFINITY {
                ends.sort_by(|a: &(u64, f64), b| a.1.total_cmp(&b.1).then(a.0.cmp(&b.0)));
                return ends;
            }
            if begin <= end {
                let (_, resources, cap, bytes) = flows[begins[0]];
                network.begin(now, resources, cap, bytes, begins.remove(0) as u64);
            } else {
                let mut done = Vec::new();
                network.complete(foreseen.pop().unwrap(), &mut done);
                ends.extend(done.into_iter().map(|flow| (flow, (now * 1e6).round() / 1e6)));
            }
            network.settle(now, |completion| foreseen.push(completion));
        }
    }

    #[test]
    fn a_flow_alone_gets_its_cap_or_the_link() {
        assert_eq!(play(&[10.0], &[(0.0, &[0], 4.0, 40.0)]), [(0, 10.0)]);
        assert_eq!(play(&[10.0], &[(0.0, &[0], 40.0, 40.0)]), [(0, 4.0)]);
    }

    #[test]
    fn equal_flows_share_and_the_rest_goes_to_flows_that_can_use_it() {
        // 10 for two: 5 each until the first is done, then all.
        assert_eq!(play(&[10.0], &[(0.0, &[0], 99.0, 20.0), (0.0, &[0], 99.0, 40.0)]), [(0, 4.0), (1, 6.0)]);
        // One can use 2, the other gets 8.
        assert_eq!(play(&[10.0], &[(0.0, &[0], 2.0, 10.0), (0.0, &[0], 99.0, 40.0)]), [(0, 5.0), (1, 5.0)]);
    }

    #[test]
    fn max_min_over_two_links() {
        // The textbook's parking lot: 0 uses both links; link 1 is the narrow one. 0 and 2 get 3, and 1 gets 7.
        let flows: [(f64, &[ResourceId], f64, f64); 3] =
            [(0.0, &[0, 1], 99.0, 30.0), (0.0, &[0], 99.0, 70.0), (0.0, &[1], 99.0, 30.0)];
        assert_eq!(play(&[10.0, 6.0], &flows), [(0, 10.0), (1, 10.0), (2, 10.0)]);
    }

    #[test]
    fn a_newcomer_slows_the_others_from_then_on() {
        let flows: [(f64, &[ResourceId], f64, f64); 2] = [(0.0, &[0], 99.0, 100.0), (5.0, &[0], 99.0, 20.0)];
        // 50 are done at 5; then 5 each: the second at 9, the first has 30 left and is done at 12.
        assert_eq!(play(&[10.0], &flows), [(1, 9.0), (0, 12.0)]);
    }

    #[test]
    fn a_resource_named_twice_counts_twice() {
        assert_eq!(play(&[10.0], &[(0.0, &[0, 0], 99.0, 20.0)]), [(0, 4.0)]);
    }

    #[test]
    fn what_goes_over_other_links_does_not_matter() {
        let flows: [(f64, &[ResourceId], f64, f64); 2] = [(0.0, &[0], 99.0, 20.0), (1.0, &[1], 99.0, 20.0)];
        assert_eq!(play(&[10.0, 5.0], &flows), [(0, 2.0), (1, 5.0)]);
    }
}
