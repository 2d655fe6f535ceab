//! Graphs: work that was captured from streams, and is repeated.

use std::sync::{Arc, Condvar, Mutex};

use crate::{
    lock,
    races::order::{self, Order},
    schedule,
    stream::Work,
    wait,
};

#[derive(Clone)]
pub(crate) struct Node {
    pub work: Work,
    pub after: Vec<usize>,
    /// The stream it was captured in: its nodes run in order.
    pub lane: usize,
}

/// Nodes and what they wait for.
#[derive(Clone)]
pub(crate) struct Graph {
    nodes: Arc<[Node]>,
    /// Whether it runs: one run at a time.
    running: Arc<(Mutex<bool>, Condvar)>,
}

/// A run of a graph.
struct GraphRun {
    nodes: Arc<[Node]>,
    start: Order,
    /// What is known behind each node that is done.
    done: Mutex<Vec<Option<Order>>>,
    changed: Condvar,
}

/// Waits until the condition of a value is met.
fn wait_until<T>(value: &Mutex<T>, changed: &Condvar, is_met: impl Fn(&mut T) -> bool) {
    if schedule::is_on() {
        return schedule::wait_until(|| is_met(&mut lock(value)));
    }
    let mut value = lock(value);
    while !is_met(&mut value) {
        value = wait(changed, value);
    }
}

impl GraphRun {
    /// Runs nodes one after the other, each when those it waits for are done.
    fn lane(&self, lane: &[usize]) {
        for &index in lane {
            let node = &self.nodes[index];
            let is_ready =
                |done: &mut Vec<Option<Order>>| node.after.iter().all(|&node| done[node].is_some());
            wait_until(&self.done, &self.changed, is_ready);
            let before = node.after.iter().filter_map(|&before| lock(&self.done)[before].clone()).collect();
            order::set(order::behind(&self.start, before));
            (node.work)();
            lock(&self.done)[index] = Some(order::get());
            self.changed.notify_all();
        }
    }
}

impl Graph {
    pub(crate) fn new(nodes: Vec<Node>) -> Self {
        Self { nodes: nodes.into(), running: Arc::default() }
    }

    pub(crate) fn len(&self) -> usize {
        self.nodes.len()
    }

    pub(crate) fn run(&self) {
        wait_until(&self.running.0, &self.running.1, |is_running| !std::mem::replace(is_running, true));
        let mut lanes: Vec<(usize, Vec<usize>)> = Vec::new();
        for (index, node) in self.nodes.iter().enumerate() {
            match lanes.iter_mut().find(|(lane, _)| *lane == node.lane) {
                Some((_, lane)) => lane.push(index),
                None => lanes.push((node.lane, vec![index])),
            }
        }
        let done = Mutex::new(vec![None; self.nodes.len()]);
        let (nodes, start, changed) = (self.nodes.clone(), order::get(), Condvar::new());
        let run = Arc::new(GraphRun { nodes, start, done, changed });
        if lanes.len() == 1 {
            lanes.iter().for_each(|(_, lane)| run.lane(lane));
        } else {
            for (_, lane) in lanes {
                let run = run.clone();
                let work = move || run.lane(&lane);
                if schedule::is_on() { schedule::spawn(work) } else { _ = std::thread::spawn(work) }
            }
        }
        wait_until(&run.done, &run.changed, |done| done.iter().all(Option::is_some));
        let all = lock(&run.done).iter().flatten().cloned().collect();
        order::set(order::behind(&run.start, all));
        *lock(&self.running.0) = false;
        self.running.1.notify_all();
    }
}
