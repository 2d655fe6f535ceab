//! Signals: how one rank tells another that something is ready.
//!
//! Everything is a **packet**: a [`Head`] of one cache line with a stamp, and data beside it. Only its owner writes a
//! packet; it writes the data, then the stamp with release order; others poll the stamp with acquire order and then
//! read the data. The stamp is a sequence number, so nothing is ever reset.
//!
//! What makes it safe to *reuse* a packet differs:
//! * In **rounds** ([`Rounds`](rounds::Rounds)) every rank posts one packet and waits for everybody's. There are two
//!   packets per rank, used in turn: a rank that has seen everybody's packet of round `k` knows that all have read
//!   those of round `k − 1`. No acknowledgement is ever sent.
//! * In a **channel** from one rank to another, a ring of packets, the reader acknowledges what it has consumed.

pub(crate) mod channel;
mod matching;
#[cfg(all(test, loom))]
mod model;
pub(crate) mod packet;
pub(crate) mod rounds;

pub(crate) use packet::Head;
