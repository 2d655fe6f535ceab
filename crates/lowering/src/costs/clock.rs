//! The simulation of a graph on one rank: a stream that computes, and for each group one that carries its collectives.

use std::collections::BTreeMap;

use super::Costs;
use crate::{graph::Op, ids::TokenId, op::Kind};

/// The times at which things end. All ranks are taken to start a collective together.
pub(crate) struct Clock<'g> {
    /// How much of the machine collectives take from computation beside them, in thousandths.
    share: u64,
    now: u64,
    ended: BTreeMap<TokenId, u64>,
    /// When the last collective of each group ends.
    free: BTreeMap<&'g str, u64>,
    /// When the last collective of all groups ends.
    busy: u64,
}

impl<'g> Clock<'g> {
    pub(crate) fn new(costs: &Costs) -> Self {
        Self { share: costs.share.min(999), now: 0, ended: BTreeMap::new(), free: BTreeMap::new(), busy: 0 }
    }

    /// The time at which the computing stream has come to the next operation.
    pub(crate) fn now(&self) -> u64 {
        self.now
    }

    /// When the collectives of these tokens have ended.
    pub(crate) fn end_of(&self, tokens: &[TokenId]) -> u64 {
        tokens.iter().filter_map(|token| self.ended.get(token)).copied().max().unwrap_or(0)
    }

    /// Runs an operation that takes so long alone.
    pub(crate) fn run(&mut self, op: &'g Op, time: u64) {
        match &op.kind {
            Kind::Start { coll, token } => self.start(&coll.group, *token, time),
            Kind::Wait { tokens } => self.wait(tokens),
            _ => self.now = self.now.saturating_add(self.beside(time)),
        }
    }

    /// Starts a collective that takes so long alone, after the group's others.
    pub(crate) fn start(&mut self, group: &'g str, token: TokenId, time: u64) {
        let free = self.free.entry(group).or_default();
        *free = self.now.max(*free).saturating_add(time);
        self.ended.insert(token, *free);
        self.busy = self.busy.max(*free);
    }

    /// Waits for the collectives of these tokens.
    pub(crate) fn wait(&mut self, tokens: &[TokenId]) {
        self.now = self.now.max(self.end_of(tokens));
    }

    /// The time of a computation that may run beside collectives, which slow it down while they last.
    fn beside(&self, time: u64) -> u64 {
        let window = self.busy.saturating_sub(self.now);
        let done = (u128::from(window) * u128::from(1000 - self.share) / 1000) as u64;
        match time <= done {
            true => (u128::from(time) * 1000 / u128::from(1000 - self.share)) as u64,
            false => window.saturating_add(time - done),
        }
    }
}
