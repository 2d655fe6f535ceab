//! All-reduce: every rank gets the reduction of the inputs of all ranks.
//!
//! Two algorithms give the same bits, so the choice between them affects only the speed:
//!
//! * **One-shot**: every rank posts its whole input and reduces the inputs of all ranks. It takes one round, in which each of
//!   the `W` ranks reads and reduces `W·n` bytes. It is best for small messages.
//! * **Two-shot**: rank `r` reduces only the `r`-th part and posts the result, which the others copy
//!   (reduce-scatter, then all-gather). Each rank reduces `n` bytes in all, for any `W`. Large messages are sent in
//!   pieces, and a round carries the inputs of one piece together with the results of the piece before.
//!
//!   Tensors that lie in symmetric memory ([`symmetric`](Communicator::symmetric)) on all ranks are
//!   not staged: each rank reduces its part directly from all inputs into all outputs. (After
//!   an error, slower ranks may still access such tensors: do not use them until all ranks have left or synchronised again.)
//!
//! Where ranks are on several nodes, both read what remote ranks post in its mirrors in their node's memory, and add up in the order of
//! the nodes: the ranks of each node first, then the nodes' sums, rounded once. A two-shot can go [by nodes](crate::hierarchical) instead:
//! then the nodes exchange only their sums and the results.
//!
//! On GPUs ([`CudaCollectives`](crate::cuda::CudaCollectives)) both store into the peers' memory through NVLink. The data itself
//! shows whether it has arrived, so there are one or two hops and no flags.
//!
//! The floor for large messages on the host is memory bandwidth: each rank must read its input and write its output once. The
//! pieces are sized to stay in the L2 cache on their way through the mailboxes.

mod choice;
mod cuda;
mod host;
mod order;
mod registered;

pub use choice::tune;
pub(crate) use cuda::{ReduceKernel, Reducing, run_staged};
pub(crate) use host::Reduce;
pub(crate) use order::InOrder;
pub(crate) use registered::{Registered, run_registered};

use antiphon_fabric::{Communicator, Operation, Signature};

use crate::{
    AlgorithmTable,
    arguments::{CheckedCall, Input, Output},
    error::{CollectiveError, Result},
    hierarchical::{self, HIERARCHICAL, Kind, Work},
};

/// How an all-reduce is carried out, on the host and on GPUs. The result has the same bits in every case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Algorithm {
    /// Every rank reduces everything.
    OneShot = 1,
    /// Every rank reduces a part, and the parts are gathered.
    TwoShot = 2,
}

impl AlgorithmTable {
    /// The algorithm for this many bytes.
    #[inline]
    pub(crate) fn algorithm(&self, bytes: usize) -> Algorithm {
        Algorithm::ALL[self.choose(bytes)]
    }
}

impl Algorithm {
    /// All of them, in the order of their numbers.
    pub const ALL: [Self; 2] = [Self::OneShot, Self::TwoShot];

    /// The name, as the command line and tables write it.
    pub fn name(self) -> &'static str {
        let name = Operation::AllReduce.row().algorithm(self as u8);
        name.expect("the row of all-reduce has every algorithm's name")
    }

    /// The number of the algorithm in a signature, where registered memory has numbers of its own.
    pub(crate) fn number(self, registered: bool) -> u8 {
        self as u8 + if registered { Self::ALL.len() as u8 } else { 0 }
    }
}

impl std::fmt::Display for Algorithm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// The caller's choices of how an all-reduce is carried out. All ranks pass the same.
///
/// ```
/// use antiphon_collectives::all_reduce::{Algorithm, AllReduceOptions};
///
/// assert_eq!(AllReduceOptions::from(Algorithm::OneShot).algorithm, Some(Algorithm::OneShot));
/// assert!(AllReduceOptions::registered(Algorithm::TwoShot).registered);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AllReduceOptions {
    /// The algorithm. `None` leaves the choice to measured tables; for registered tensors it is two-shot in place, else
    /// one-shot, which needs no registered output.
    pub algorithm: Option<Algorithm>,
    /// Whether the tensors lie in [registered](crate::cuda::CudaCollectives::register) memory of GPUs, at the same place of the
    /// memory on all ranks: peers load the input where it lies, and nothing is staged. docs/design/cuda.md compares its speed
    /// with the staged form. One-shot's output is any other memory of this rank; two-shot's is registered too, and may be the
    /// input.
    ///
    /// [`CollectiveError::Refused`] is the answer to tensors that are not in registered memory, and to an output that the input is
    /// in the way of. Ranks whose tensors are in different places of the memory find out, as all that disagree, but only at the end:
    /// until then each has stored where its own place is.
    ///
    /// The host refuses it: there, tensors in symmetric memory go without staging in any case. NCCL does not look at it.
    pub registered: bool,
}

impl AllReduceOptions {
    /// The options for registered tensors.
    pub fn registered(algorithm: impl Into<Option<Algorithm>>) -> Self {
        Self { algorithm: algorithm.into(), registered: true }
    }

    /// Registered memory, and any algorithm.
    const ANY_REGISTERED: u8 = 2 * Algorithm::ALL.len() as u8 + 1;

    /// The number that stands for these options in a [`Call`](crate::Call).
    #[inline]
    pub fn number(self) -> u8 {
        match self {
            Self { algorithm: Some(algorithm), registered } => algorithm.number(registered),
            Self { algorithm: None, registered: true } => Self::ANY_REGISTERED,
            Self { algorithm: None, registered: false } => 0,
        }
    }

    /// The options that a [`Call`](crate::Call)'s number stands for.
    ///
    /// # Errors
    /// [`CollectiveError::Refused`] for a number that stands for none.
    #[inline]
    pub(crate) fn numbered(number: u8) -> Result<Self> {
        let all = [None].into_iter().chain(Algorithm::ALL.map(Some));
        let mut all =
            all.flat_map(|algorithm| [false, true].map(|registered| Self { algorithm, registered }));
        all.find(|options| options.number() == number).ok_or_else(|| CollectiveError::Refused {
            operation: Operation::AllReduce.name(),
            which: "algorithm",
            expected: format!(
                "one of {}, not number {number}",
                Algorithm::ALL.map(Algorithm::name).join(", ")
            ),
        })
    }
}

impl From<Algorithm> for AllReduceOptions {
    fn from(algorithm: Algorithm) -> Self {
        Self { algorithm: Some(algorithm), registered: false }
    }
}

impl From<Option<Algorithm>> for AllReduceOptions {
    fn from(algorithm: Option<Algorithm>) -> Self {
        Self { algorithm, registered: false }
    }
}

/// The algorithm that [`all_reduce`](crate::Collectives::all_reduce) takes for a tensor of `bytes` bytes, which is the same on every
/// rank. All ranks call this function together.
///
/// # Errors
/// As an object exchange, at the first question: the ranks then compare the tables in their caches, and
/// take the built-in one if not.
pub fn algorithm_for(comm: &Communicator, bytes: usize) -> Result<Algorithm> {
    choice::look_up(comm, bytes)
}

/// Carries out an all-reduce on host memory.
pub(crate) fn run(comm: &Communicator, call: &CheckedCall<'_>) -> Result<()> {
    let AllReduceOptions { algorithm, registered } = AllReduceOptions::numbered(call.call.algorithm)?;
    if registered {
        let expected =
            "left out on the host, where tensors in symmetric memory are reduced in place in any case"
                .to_owned();
        return Err(CollectiveError::Refused {
            operation: call.signature.operation.name(),
            which: "registration",
            expected,
        });
    }
    let (Some(input), Some(output)) = (&call.input, &call.output) else { return Ok(()) };
    let signature = |algorithm| Signature { algorithm, ..call.signature };
    let sum = InOrder::new(comm, call.dtype, call.call.op);
    carry_out(comm, algorithm, signature, input, output, &sum, |_| ())
}

/// The all-reduce that a signature stands for, which `signature` makes from the number of the algorithm (0 before one is chosen).
/// `arrived` hears up to which byte the output is complete.
#[inline]
pub(crate) fn carry_out(
    comm: &Communicator,
    algorithm: Option<Algorithm>,
    signature: impl Fn(u8) -> Signature,
    input: &Input,
    output: &Output,
    reducer: &impl Reduce,
    arrived: impl FnMut(usize),
) -> Result<()> {
    let (bytes, size) = (input.count * input.dtype.size(), input.dtype.size());
    let (algorithm, form) = match algorithm {
        Some(given) => (given, None),
        None => choice::choose(comm, &signature(0), bytes)?,
    };
    if algorithm == Algorithm::TwoShot
        && let Some(nodes) = hierarchical::form(comm, Kind::AllReduce, form, size, || reducer.sum_size())?
    {
        let signature = &signature(algorithm as u8 | HIERARCHICAL);
        let (elements, input, output) = (input.count, input.data, output.data);
        let work = Work { kind: Kind::AllReduce, nodes, signature, reducer, size, elements, input, output };
        // SAFETY: as below.
        let mut rounds = unsafe { comm.rounds()? };
        return Ok(work.run(&mut rounds, |_| 0..0, arrived)?);
    }
    let signature = signature(algorithm as u8);
    // SAFETY: every rank runs the algorithm that the signature names, which posts the same layouts everywhere.
    let mut rounds = unsafe { comm.rounds()? };
    match algorithm {
        Algorithm::OneShot => host::one_shot(&mut rounds, &signature, input, output, reducer, arrived)?,
        Algorithm::TwoShot => host::two_shot(&mut rounds, &signature, input, output, reducer, arrived)?,
    }
    Ok(())
}
