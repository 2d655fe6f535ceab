//! Signals, by which ranks tell each other that data is ready.
//!
//! All signals are **packets**: a packet is a [`Head`] of one cache line with a stamp, and data beside it. Only its owner
//! writes a packet: first the data, then the stamp with release order. Other ranks poll the stamp with acquire order and then
//! read the data. The stamp is a sequence number, so it is never reset.
//!
//! A packet may be *reused* for one of two reasons:
//! * In **rounds** ([`Rounds`](rounds::Rounds)) every rank posts one packet and waits for the packets of all ranks. Each rank
//!   has two packets, used alternately: a rank that has seen all packets of round `k` knows that all ranks have read those of
//!   round `k − 1`. No acknowledgement is sent.
//! * A **channel** from one rank to another is a ring of packets; the reader acknowledges the packets that it has read.

pub(crate) mod arena_offsets;
pub(crate) mod channel;
pub(crate) mod given_up;
pub(crate) mod matching;
#[cfg(all(test, loom))]
mod model;
pub(crate) mod packet;
pub(crate) mod rounds;

pub(crate) use packet::Head;
