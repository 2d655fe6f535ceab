//! What is measured, and how.

use std::num::NonZeroUsize;

use antiphon::{
    collectives::{
        all_reduce::{Algorithm, AllReduceOptions},
        cuda::CudaCollectives,
        mixed::MixedMode,
    },
    device::ReduceOp,
    operation::Operation,
    tensor::DType,
};

use crate::{
    Pace,
    case::{Case, Collective},
    cuda::tail,
    host::{
        engine,
        mixed::{self, Shape},
    },
};

/// One collective, the usual five, or those of a mixed layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Subject {
    /// The usual five.
    All,
    /// Those of a mixed layout.
    Mixed,
    /// One.
    One(Collective),
}

impl Subject {
    /// Everything that can be measured.
    pub fn every() -> impl Iterator<Item = Self> {
        [Self::All, Self::Mixed].into_iter().chain(Collective::all().map(Self::One))
    }

    /// The name, in words that underscores join.
    pub fn name(self) -> &'static str {
        match self {
            Self::All => "all",
            Self::Mixed => "mixed",
            Self::One(collective) => collective.name(),
        }
    }

    /// What it is, where the name does not say that.
    pub fn about(self) -> Option<&'static str> {
        match self {
            Self::All => Some("All-reduce, all-gather, reduce-scatter, all-to-all and broadcast"),
            Self::Mixed => Some(mixed::ABOUT),
            Self::One(collective) => collective.about(),
        }
    }
}

/// The kind of the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Device {
    /// Processes on the cores of this machine.
    Host,
    /// Processes with a GPU each.
    Cuda,
}

/// The algorithms of an all-reduce that are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Algorithms {
    /// The one that the tables choose.
    Auto,
    /// A given one.
    Only(Algorithm),
    /// Each; on GPUs also the chosen one.
    All,
}

/// Ranks that do not start together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tail {
    /// Whether calls are in a stream of the highest priority.
    pub priority: bool,
    /// Tokens of a tensor, at most [`TAIL_MOST_ROWS`](crate::TAIL_MOST_ROWS).
    pub rows: Vec<u64>,
    /// By how many microseconds a rank is late.
    pub skews: Vec<u64>,
    /// Whether the rows beside products of matrices are left out.
    pub alone: bool,
}

/// What is measured, and how. The default is the usual five between processes, in f32.
#[derive(Debug, Clone)]
pub struct Settings {
    /// What is measured.
    pub subject: Subject,
    /// The device of the tensors and of the computation.
    pub device: Device,
    /// How many ranks; `None` leaves that to the machine.
    pub ranks: Option<usize>,
    /// The kind of elements.
    pub dtype: DType,
    /// The sizes in bytes of the larger buffer of a rank; `None` for those that suit the subject.
    pub sizes: Option<Vec<u64>>,
    /// The reduction.
    pub op: ReduceOp,
    /// The layout of [`Subject::Mixed`].
    pub layout: Shape,
    /// How all-reduce is done; `None` for the chosen one, on GPUs for all.
    pub algorithms: Option<Algorithms>,
    /// Into how many tensors of one call the bytes are cut.
    pub tensors: NonZeroUsize,
    /// Whether the tensors are in symmetric memory, on GPUs registered.
    pub symmetric: bool,
    /// How long is measured.
    pub pace: Pace,
    /// Measures the tail in place of the table.
    pub tail: Option<Tail>,
    /// Bytes of each GPU's memory for data under way; `None` for what the library takes.
    pub staging: Option<u64>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            subject: Subject::All,
            device: Device::Host,
            ranks: None,
            dtype: DType::F32,
            sizes: None,
            op: ReduceOp::Sum,
            layout: Shape::one_node(2, 2),
            algorithms: None,
            tensors: NonZeroUsize::MIN,
            symmetric: false,
            pace: Pace::default(),
            tail: None,
            staging: None,
        }
    }
}

impl Settings {
    pub(crate) fn collectives(&self) -> Vec<Collective> {
        use Operation::{AllGather, AllReduce, AllToAll, Broadcast, ReduceScatter};
        match self.subject {
            Subject::All => {
                [AllReduce, AllGather, ReduceScatter, AllToAll, Broadcast].map(Collective::Of).into()
            }
            Subject::Mixed => self.layout.all().map(Collective::Mixed).collect(),
            Subject::One(collective) => vec![collective],
        }
    }

    pub(crate) fn sizes(&self) -> Vec<u64> {
        let (first, last, factor) = match (self.device, self.subject) {
            (Device::Cuda, _) => (1 << 10, 256 << 20, 4),
            (Device::Host, Subject::All | Subject::Mixed) => (64, 16 << 20, 8),
            (Device::Host, Subject::One(_)) => (4, 64 << 20, 4),
        };
        let default = || std::iter::successors(Some(first), |size| Some(size * factor));
        self.sizes.clone().unwrap_or_else(|| default().take_while(|&size| size <= last).collect())
    }

    /// A case of a collective and size, as it is chosen.
    pub(crate) fn case(&self, collective: Collective, bytes: u64) -> Case {
        Case {
            collective,
            bytes,
            how: AllReduceOptions::default(),
            mode: None,
            dtype: self.dtype,
            op: self.op,
            tensors: self.tensors.get(),
        }
    }

    /// All-reduce has a row per algorithm, the others one.
    fn options(&self, collective: Collective) -> Vec<AllReduceOptions> {
        let on_gpus = self.device == Device::Cuda;
        // Nothing chooses registered memory by itself.
        let registered = on_gpus && self.symmetric;
        let default = if on_gpus { Algorithms::All } else { Algorithms::Auto };
        let algorithms = match self.algorithms.unwrap_or(default) {
            _ if collective != Collective::ALL_REDUCE => vec![None],
            Algorithms::Only(algorithm) => vec![Some(algorithm)],
            Algorithms::Auto if !registered => vec![None],
            _ => {
                let chosen = (on_gpus && !registered).then_some(None);
                chosen.into_iter().chain(Algorithm::ALL.map(Some)).collect()
            }
        };
        let registered = registered && collective == Collective::ALL_REDUCE;
        algorithms.into_iter().map(|algorithm| AllReduceOptions { algorithm, registered }).collect()
    }

    /// The modes of a collective: those of a mixed operation, and on GPUs always two collectives.
    fn modes(&self, collective: Collective) -> Vec<Option<MixedMode>> {
        let Collective::Mixed(mixed) = collective else { return vec![None] };
        let mut modes: Vec<_> = mixed.modes().collect();
        if self.device == Device::Cuda && !modes.contains(&Some(MixedMode::Composed)) {
            modes.push(Some(MixedMode::Composed));
        }
        modes
    }

    /// Everything to measure, in order, a row each. Every rank makes the same list.
    pub(crate) fn cases(&self) -> Vec<Case> {
        let mut cases = Vec::new();
        for collective in self.collectives() {
            for bytes in self.sizes() {
                for how in self.options(collective) {
                    let case = Case { how, ..self.case(collective, bytes) };
                    cases.extend(self.modes(collective).into_iter().map(|mode| Case { mode, ..case }));
                }
            }
        }
        cases
    }

    /// How many rows the table will have.
    pub fn rows(&self) -> usize {
        self.cases().len()
    }

    /// How many ranks there are, if the machine has no say.
    pub fn fixed_ranks(&self) -> Option<usize> {
        match self.subject {
            Subject::Mixed => Some(self.layout.ranks()),
            Subject::One(Collective::Engine) => Some(engine::RANKS),
            _ => self.ranks,
        }
    }

    /// The size of each case, and the bytes of all ranks' tensors together. On GPUs too they are made, and compared, in the memory
    /// of the host.
    pub fn memory(&self, ranks: usize) -> impl Iterator<Item = (u64, u128)> {
        // A copy in symmetric memory stands beside the tensor that it is filled from.
        let copies = if self.symmetric { 2 } else { 1 };
        self.cases().into_iter().map(move |case| {
            let (input, output) = case.counts(ranks.max(1) - 1, ranks.max(1)); // of the last rank, whose part is the longest
            let elements = (input as u128 + output as u128) * copies * ranks as u128;
            (case.bytes, elements * case.dtype.size() as u128)
        })
    }

    /// Refuses arguments that do not go together. `draws` is whether the command will draw what is measured.
    ///
    /// # Errors
    /// A text that names the arguments as the command's users write them.
    pub fn refuse(&self, draws: bool) -> Result<(), String> {
        match (self.device, self.subject) {
            (Device::Host, _) if self.tail.is_some() => return Err("--tail is for --device cuda".into()),
            (Device::Host, _) if self.tensors.get() > 1 => {
                return Err("--tensors is for --device cuda".into());
            }
            (_, Subject::Mixed) => mixed::refuse(self)?,
            (_, Subject::One(Collective::Engine)) => engine::refuse(self)?,
            _ => {}
        }
        if self.device == Device::Cuda {
            return self.refuse_on_gpus(draws);
        }
        match self.collectives().into_iter().find(|of| self.symmetric && of.is_of_experts()) {
            Some(of) => Err(format!("--buffers symmetric is not for {}", of.name())),
            None => Ok(()),
        }
    }

    /// Refuses what does not suit GPUs.
    fn refuse_on_gpus(&self, draws: bool) -> Result<(), String> {
        if self.tail.is_some() {
            return match tail::measures(self) && self.sizes.is_none() && !draws {
                true => Ok(()),
                false => Err(tail::REFUSED.into()),
            };
        }
        let other = |is_served: &dyn Fn(Collective) -> bool| {
            self.collectives().into_iter().find(|&collective| !is_served(collective)).map(Collective::name)
        };
        if let (true, Some(other)) = (self.symmetric, other(&|of| of == Collective::ALL_REDUCE)) {
            return Err(format!("--buffers symmetric on GPUs is for all-reduce alone, not for {other}"));
        }
        let listed = [Operation::AllGather, Operation::ReduceScatter].map(Collective::Of);
        if let (2.., Some(other)) = (self.tensors.get(), other(&|of| listed.contains(&of))) {
            return Err(format!("--tensors is for all-gather and reduce-scatter, not for {other}"));
        }
        let is_known = |of: Collective| {
            matches!(of, Collective::SEND_RECV | Collective::Mixed(_))
                || of.is_of_experts()
                || of.operation().is_some_and(CudaCollectives::has_operation)
        };
        match other(&is_known) {
            Some(other) => Err(format!("{other} is for --device host: there is none on GPUs yet")),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on_gpus() -> Settings {
        Settings { device: Device::Cuda, ..Settings::default() }
    }

    fn one(collective: Collective) -> Settings {
        Settings { subject: Subject::One(collective), ..on_gpus() }
    }

    fn tail() -> Option<Tail> {
        Some(Tail { priority: false, rows: vec![1], skews: vec![0], alone: true })
    }

    #[test]
    fn all_algorithms_are_compared_unless_one_is_asked_for() {
        let names = |algorithms, symmetric| {
            let settings = Settings { algorithms, symmetric, ..on_gpus() };
            let options = settings.options(Collective::ALL_REDUCE).into_iter();
            options.map(|how| how.algorithm.map_or("auto", Algorithm::name)).collect::<Vec<_>>()
        };
        let two_shot = Some(Algorithms::Only(Algorithm::TwoShot));
        assert_eq!(names(None, false), ["auto", "one-shot", "two-shot"]);
        assert_eq!(names(Some(Algorithms::All), false), names(None, false));
        assert_eq!(names(Some(Algorithms::Auto), false), ["auto"]);
        assert_eq!(names(two_shot, false), ["two-shot"]);
        assert_eq!(names(None, true), ["one-shot", "two-shot"]);
        assert_eq!(names(Some(Algorithms::Auto), true), ["one-shot", "two-shot"]);
        assert_eq!(names(two_shot, true), ["two-shot"]);
        let others = Settings { algorithms: two_shot, ..on_gpus() };
        let gather = Collective::Of(Operation::AllGather);
        assert_eq!(others.options(gather), [AllReduceOptions::default()]);
        assert_eq!(Settings::default().options(Collective::ALL_REDUCE), [AllReduceOptions::default()]);
    }

    #[test]
    fn sizes_times_collectives_times_algorithms_are_the_rows() {
        let settings = Settings { sizes: Some(vec![4 << 10, 1 << 20]), ..on_gpus() };
        assert_eq!(settings.rows(), 2 * (3 + 4));
        assert_eq!(Settings { device: Device::Host, ..settings }.rows(), 2 * 5);
        assert_eq!(Settings::default().sizes(), [64, 512, 4 << 10, 32 << 10, 256 << 10, 2 << 20, 16 << 20]);
    }

    #[test]
    fn gpus_compare_two_collectives_with_every_layout() {
        let layout = "2x1".parse().unwrap();
        let host = Settings { subject: Subject::Mixed, layout, ..Settings::default() };
        let modes = |settings: &Settings| settings.modes(settings.collectives()[0]).len();
        assert_eq!((modes(&host), modes(&Settings { device: Device::Cuda, ..host.clone() })), (3, 4));
    }

    #[test]
    fn what_gpus_cannot_do_is_refused_by_name() {
        assert_eq!(on_gpus().refuse(true), Ok(()));
        for known in [Collective::SEND_RECV, Collective::DISPATCH, Collective::COMBINE] {
            assert_eq!(one(known).refuse(false), Ok(()));
        }
        let error = one(Collective::Memory).refuse(false).unwrap_err();
        assert_eq!(error, "memory is for --device host: there is none on GPUs yet");
        let error = Settings { symmetric: true, ..on_gpus() }.refuse(false).unwrap_err();
        assert_eq!(error, "--buffers symmetric on GPUs is for all-reduce alone, not for all_gather");
        assert_eq!(Settings { symmetric: true, ..one(Collective::ALL_REDUCE) }.refuse(false), Ok(()));
        let gather = Settings { tail: tail(), ..one(Collective::Of(Operation::AllGather)) };
        assert_eq!(gather.refuse(false), Ok(()));
        assert!(gather.refuse(true).is_err());
        let error = Settings { tail: tail(), ..one(Collective::Of(Operation::Broadcast)) }.refuse(false);
        assert!(error.unwrap_err().contains("combine at its own sizes"));
        assert!(Settings { tail: tail(), sizes: Some(vec![1 << 20]), ..on_gpus() }.refuse(false).is_err());
    }
}
