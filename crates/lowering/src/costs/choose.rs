//! The choice among the ways of making a call.

use super::{Costs, Way};
use crate::{costs::Device, decisions::Choice};

/// An all-reduce whose way is to be chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Call {
    /// The bytes of a rank's tensor.
    pub bytes: u64,
    /// The ranks of its group.
    pub ranks: u32,
    /// The nanoseconds of computation between its start and its wait.
    pub hidden: u64,
    /// The nanoseconds of the operations behind it that a fused call includes, if there are any.
    pub epilogue: Option<u64>,
    /// Whether its tensor can lie in memory that peers reach.
    pub registrable: bool,
}

/// The bytes from which on an all-reduce between H200s takes no longer with memory that peers reach.
const REGISTERED_FREE_FROM: u64 = 16 << 20;
/// What it costs below that, in nanoseconds.
const REGISTERED_COST: u64 = 3_000;

impl Costs {
    /// The way of a call that is predicted to end first, together with the computation beside it and behind it. Of equal
    /// ones the first in the order of [`Choice`] is taken.
    ///
    /// ```
    /// use antiphon_lowering::{Call, Choice, Costs, Device};
    ///
    /// let costs = Costs::of(Device::H200);
    /// let call = Call { bytes: 64 << 10, ranks: 4, ..Call::default() };
    /// assert_eq!(costs.choose(&call), Choice::Sync);
    /// assert_eq!(costs.choose(&Call { epilogue: Some(5_000), ..call }), Choice::Fused);
    /// assert_eq!(costs.choose(&Call { hidden: 100_000, ..call }), Choice::Async);
    /// let registrable = Call { registrable: true, ..call };
    /// assert_eq!(costs.choose(&registrable), Choice::Sync);
    /// assert_eq!(Costs::of(Device::Host).choose(&registrable), Choice::Sync);
    /// ```
    pub fn choose(&self, call: &Call) -> Choice {
        let all = [Choice::Fused, Choice::Sync, Choice::Registered, Choice::Async];
        let can = |choice: &Choice| match choice {
            Choice::Fused => call.epilogue.is_some(),
            Choice::Registered => call.registrable,
            Choice::Sync | Choice::Async => true,
        };
        all.into_iter()
            .filter(can)
            .min_by_key(|choice| self.time(*choice, call))
            .expect("sync is always possible")
    }

    /// The predicted nanoseconds of a call with the computation beside it and behind it, made in this way.
    pub fn time(&self, choice: Choice, call: &Call) -> u64 {
        let alone = |way| self.call(way, call.ranks, call.bytes);
        let epilogue = call.epilogue.unwrap_or(0);
        let (time, epilogue) = match choice {
            Choice::Fused => (alone(Way::Fused).saturating_add(call.hidden), 0),
            Choice::Sync => (alone(Way::Sync).saturating_add(call.hidden), epilogue),
            Choice::Registered => (self.registered(call).saturating_add(call.hidden), epilogue),
            Choice::Async => (alone(Way::Async).max(call.hidden), epilogue),
        };
        time.saturating_add(epilogue)
    }

    /// In stream order, on memory that peers reach. On the host this saves a copy, but no time: between two ranks of an idle
    /// EPYC, all-reduces take 0.93 to 1.18 of theirs (`benches/comm_buffers.py`).
    fn registered(&self, call: &Call) -> u64 {
        let sync = self.call(Way::Sync, call.ranks, call.bytes);
        match self.device {
            Device::H200 if call.bytes < REGISTERED_FREE_FROM => sync.saturating_add(REGISTERED_COST),
            Device::Host | Device::H200 => sync,
        }
    }
}
