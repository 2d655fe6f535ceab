//! Ready programs: the usual algorithms of the usual collectives.
//!
//! [`ALGORITHMS`] lists them, [`find`] finds one by its name, and [`Algorithm::plan`] makes its plan for a [`Setting`]: the
//! number of ranks, in place or not, and the way of reducing. Each is a function of its own as well, whose page describes the
//! steps of each rank, and when it is the right one.
//!
//! | collective | algorithm | steps | bytes that a rank sends |
//! | --- | --- | --- | --- |
//! | all-reduce | [`one_shot`](all_reduce::one_shot) | 1 | 2 (n − 1) S, packets |
//! | | [`packet_two_shot`](all_reduce::packet_two_shot) | 2 | 4 (n − 1)/n S, packets |
//! | | [`two_shot`](all_reduce::two_shot) | 2 | 2 (n − 1)/n S, half of which the others read |
//! | | [`ring`](all_reduce::ring) | 2 (n − 1) | 2 (n − 1)/n S |
//! | | [`hierarchical`](all_reduce::hierarchical) | 3 | 2 (k − 1)/k S in its node, (m − 1)/k S to others |
//! | | [`switch`](all_reduce::switch) | 2 | about S |
//! | all-gather | [`direct`](all_gather::direct) | 1 | (n − 1)/n S |
//! | | [`ring`](all_gather::ring) | n − 1 | (n − 1)/n S |
//! | reduce-scatter | [`direct`](reduce_scatter::direct) | 1 | (n − 1)/n S, which the others read |
//! | | [`ring`](reduce_scatter::ring) | n − 1 | (n − 1)/n S |
//! | all-to-all | [`direct`](all_to_all::direct) | 1 | (n − 1)/n S |
//! | | [`pipelined`](all_to_all::pipelined) | 1 for each piece | (n − 1)/n S |
//! | | [`packets`](all_to_all::packets) | 1 | 2 (n − 1)/n S, packets |
//! | send/receive | [`shift`](send_recv::shift) | 1 | S |
//! | | [`port_shift`](send_recv::port_shift) | 1 | S, by an engine |
//!
//! n ranks, on m nodes of k ranks each; S bytes are the larger one of a rank's two tensors. Packets are twice as large as
//! their data, and need no signals.
//!
//! All of them give the same bits on all ranks. A rank works in one thread block (in two if pipelined): more
//! blocks are more [instances](Options::instances), each with its part of every chunk.
//!
//! A plan is called again and again on the same buffers, so no rank may write to a rank that is still busy with the call
//! before. Plans of packets take turns between two scratches; the others begin with signals that a rank has begun the
//! call, unless a later wait of the algorithm implies this.
//!
//! ```
//! use antiphon_language::library::{self, Setting};
//!
//! let algorithm = library::find("ring-all-gather").expect("a name of the list");
//! let plan = algorithm.plan(&Setting { inplace: true, ..Setting::new(4) })?;
//! assert_eq!((plan.collective.as_str(), plan.num_ranks()), ("allgather", 4));
//! # Ok::<(), antiphon_language::LanguageError>(())
//! ```

pub mod all_gather;
pub mod all_reduce;
pub mod all_to_all;
mod channels;
pub mod reduce_scatter;
pub mod send_recv;

use crate::{Buffer, Collective, LanguageError, Options, Plan, Program, Protocol, Rank, ReduceOp, Result};

/// Most pairs of ranks, times instances: what a plan of all pairs grows with.
const PAIRS: u64 = 1 << 20;

/// The setting for which an algorithm makes a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    /// How many ranks: 2 at least.
    pub ranks: u32,
    /// On how many nodes: 2 at least, all with as many ranks, which are numbered node by node. Only hierarchical algorithms
    /// look at it.
    pub nodes: u32,
    /// Whether input and output share memory.
    pub inplace: bool,
    /// How reductions reduce.
    pub op: ReduceOp,
    /// Bytes of a pipeline's turn; not 0.
    pub unit_size: u64,
    /// Instances, limits and the like. Fusion and automatic meetings of threads are on whatever it says, and protocol and
    /// double scratch are the algorithm's.
    pub options: Options,
}

impl Setting {
    /// The usual setting for `ranks` ranks: out of place, sums, one instance; two nodes and turns of 256 KiB where that matters.
    pub fn new(ranks: u32) -> Self {
        let options = Options::default();
        Setting { ranks, nodes: 2, inplace: false, op: ReduceOp::Sum, unit_size: 256 << 10, options }
    }

    /// The program of a listed algorithm, in which data travels plainly.
    fn program(&self, name: &str, collective: impl FnOnce(u32) -> Collective) -> Result<Program> {
        self.program_as(name, collective, Protocol::Simple)
    }

    /// The program of a listed algorithm, in which data travels as packets, and calls take turns between two scratches.
    fn packet_program(&self, name: &str, collective: impl FnOnce(u32) -> Collective) -> Result<Program> {
        self.program_as(name, collective, Protocol::LL)
    }

    /// Nothing is computed of numbers that the algorithm is not for.
    fn program_as(
        &self,
        name: &str,
        collective: impl FnOnce(u32) -> Collective,
        protocol: Protocol,
    ) -> Result<Program> {
        self.check(find(name).expect("every algorithm is listed"))?;
        let options = Options {
            protocol,
            use_double_scratch_buffer: protocol == Protocol::LL,
            instr_fusion: true,
            auto_sync: true,
            ..self.options.clone()
        };
        Ok(Program::new(name, &collective(self.ranks).inplace(self.inplace), options))
    }

    /// The output of a rank, for a collective whose input and output are the same memory if in place.
    fn result(&self, rank: &Rank) -> Buffer {
        if self.inplace { rank.input() } else { rank.output() }
    }

    fn check(&self, algorithm: &Algorithm) -> Result<()> {
        let Setting { ranks, nodes, inplace, .. } = *self;
        let refused = |why| Err(LanguageError::Unsuited { algorithm: algorithm.name, why });
        if ranks < 2 {
            return refused(format!("needs 2 ranks, and there are {ranks}"));
        }
        if inplace && !algorithm.inplace {
            return refused("does not work in place".into());
        }
        if algorithm.nodes && (nodes < 2 || !ranks.is_multiple_of(nodes)) {
            return refused(format!(
                "needs 2 nodes with as many ranks each: not {ranks} ranks on {nodes} nodes"
            ));
        }
        if self.unit_size == 0 {
            return refused("needs turns of more than 0 bytes".into());
        }
        let pairs = u64::from(ranks).pow(2).saturating_mul(self.options.instances.into());
        if pairs > PAIRS {
            let what = "pairs of ranks times instances";
            return Err(LanguageError::TooMany { what, number: pairs, limit: PAIRS });
        }
        Ok(())
    }
}

/// One of the [list](ALGORITHMS).
#[derive(Clone, Copy, Debug)]
pub struct Algorithm {
    /// Its name, and that of its plans.
    pub name: &'static str,
    /// The collective of its plans.
    pub collective: &'static str,
    /// A line on its steps, and on when to use it.
    pub summary: &'static str,
    /// Whether it also works in place.
    pub inplace: bool,
    /// Whether it reduces, and so looks at [`Setting::op`].
    pub reduces: bool,
    /// Whether it looks at [`Setting::nodes`].
    pub nodes: bool,
    program: fn(&Setting) -> Result<Program>,
}

impl Algorithm {
    const fn reducing(self) -> Self {
        Algorithm { reduces: true, ..self }
    }

    const fn of_nodes(self) -> Self {
        Algorithm { nodes: true, ..self }
    }

    const fn out_of_place(self) -> Self {
        Algorithm { inplace: false, ..self }
    }

    /// Its plan.
    ///
    /// # Errors
    /// [`LanguageError::Unsuited`] if there are too few ranks, if it does not work in place, if the nodes do not fit or if
    /// turns are empty; [`LanguageError::TooMany`] beyond 2²⁰ pairs of ranks times instances; [`LanguageError::Plan`] if
    /// instances have no room.
    pub fn plan(&self, setting: &Setting) -> Result<Plan> {
        self.program(setting)?.plan()
    }

    /// Its program, to which more operations can be added.
    ///
    /// # Errors
    /// As [`plan`](Self::plan).
    pub fn program(&self, setting: &Setting) -> Result<Program> {
        (self.program)(setting)
    }
}

/// The algorithm of that name.
pub fn find(name: &str) -> Option<&'static Algorithm> {
    ALGORITHMS.iter().find(|algorithm| algorithm.name == name)
}

/// An algorithm that by default works in place, reduces nothing and has no nodes.
const fn algorithm(
    name: &'static str,
    collective: &'static str,
    program: fn(&Setting) -> Result<Program>,
    summary: &'static str,
) -> Algorithm {
    Algorithm { name, collective, summary, inplace: true, reduces: false, nodes: false, program }
}

/// All algorithms, by collective.
pub const ALGORITHMS: &[Algorithm] = &[
    algorithm(
        "one-shot-all-reduce",
        "allreduce",
        all_reduce::one_shot,
        "all send all to all, as packets: for small messages",
    )
    .reducing(),
    algorithm(
        "packet-all-reduce",
        "allreduce",
        all_reduce::packet_two_shot,
        "two-shot as packets: for messages between small and large, where signals are slow",
    )
    .reducing(),
    algorithm(
        "two-shot-all-reduce",
        "allreduce",
        all_reduce::two_shot,
        "each rank reduces its part, and writes it to all: for large messages",
    )
    .reducing(),
    algorithm(
        "push-two-shot-all-reduce",
        "allreduce",
        all_reduce::push_two_shot,
        "two-shot that only writes: for large messages, with the bits of a sum in rank order",
    )
    .reducing(),
    algorithm(
        "ring-all-reduce",
        "allreduce",
        all_reduce::ring,
        "parts go round twice: for large messages where links are a ring",
    )
    .reducing(),
    algorithm(
        "hierarchical-all-reduce",
        "allreduce",
        all_reduce::hierarchical,
        "in nodes, between nodes through ports, and in nodes again: for few nodes",
    )
    .reducing()
    .of_nodes(),
    algorithm(
        "switch-all-reduce",
        "allreduce",
        all_reduce::switch,
        "the switch reduces and stores: for large messages, where it can",
    )
    .reducing(),
    algorithm(
        "direct-all-gather",
        "allgather",
        all_gather::direct,
        "all write to all: where all ranks reach each other",
    ),
    algorithm("ring-all-gather", "allgather", all_gather::ring, "inputs go round: where links are a ring"),
    algorithm(
        "direct-reduce-scatter",
        "reducescatter",
        reduce_scatter::direct,
        "all read from all: where all ranks reach each other",
    )
    .reducing(),
    algorithm(
        "ring-reduce-scatter",
        "reducescatter",
        reduce_scatter::ring,
        "parts go round: where links are a ring",
    )
    .reducing(),
    algorithm(
        "direct-all-to-all",
        "alltoall",
        all_to_all::direct,
        "all write to all: for large messages, not in place",
    )
    .out_of_place(),
    algorithm(
        "pipelined-all-to-all",
        "alltoall",
        all_to_all::pipelined,
        "piece by piece through scratch: for large messages in place",
    ),
    algorithm(
        "packet-all-to-all",
        "alltoall",
        all_to_all::packets,
        "as packets: for small messages, where signals are slow",
    ),
    algorithm("send-recv", "sendrecv", send_recv::shift, "each writes to the next, not in place")
        .out_of_place(),
    algorithm(
        "port-send-recv",
        "sendrecv",
        send_recv::port_shift,
        "an engine moves each input to the next, not in place",
    )
    .out_of_place(),
];
