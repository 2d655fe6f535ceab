//! What a collection chooses among.

use antiphon_collectives::cuda::CudaCollectives;
use antiphon_fabric::{Communicator, Operation, gpu::Reduction};
use antiphon_operation::{Call, Extent};
use antiphon_plan::{Plan, ReduceOp, escaped};
use antiphon_tensor::DType;

use super::Choice;
use crate::{
    ExecutorError,
    cuda::{CudaPlan, size::message},
    error::Result,
};

/// A plan, or this library's own calls.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) algorithm: Algorithm,
    /// All, if there is none.
    pub(super) dtypes: Vec<DType>,
    /// Whether it reduces once, in the order of the ranks.
    pub(super) in_rank_order: bool,
}

#[derive(Debug)]
pub(super) enum Algorithm {
    Plan(Box<CudaPlan>),
    BuiltIn(BuiltIn),
}

impl Entry {
    /// Its name, for people.
    pub(super) fn name(&self) -> &str {
        match &self.algorithm {
            Algorithm::Plan(plan) => &plan.name,
            Algorithm::BuiltIn(_) => BuiltIn::NAME,
        }
    }

    pub(super) fn plan(&self) -> Option<&CudaPlan> {
        match &self.algorithm {
            Algorithm::Plan(plan) => Some(plan),
            Algorithm::BuiltIn(_) => None,
        }
    }

    /// Its name in a table, at its place there: plans may have one name.
    pub(super) fn label(&self, at: usize) -> String {
        match &self.algorithm {
            Algorithm::Plan(plan) => format!("{} {:08x} {at}", plan.name, plan.digest),
            Algorithm::BuiltIn(calls) => format!("{} {} {at}", BuiltIn::NAME, calls.op),
        }
    }

    /// Whether it does a collective with elements of a dtype, at some size.
    pub(super) fn does(&self, collective: &str, dtype: DType) -> bool {
        let does = match &self.algorithm {
            Algorithm::Plan(plan) => plan.plan().collective == collective,
            Algorithm::BuiltIn(calls) => calls.serves(collective, dtype, 0),
        };
        does && (self.dtypes.is_empty() || self.dtypes.contains(&dtype))
    }

    /// Whether it computes the same as another one that does `collective`: with the same bits, if these matter.
    pub(super) fn is_alike(&self, other: &Self, collective: &str, any_bits: bool) -> bool {
        self.reductions(collective) == other.reductions(collective)
            && (any_bits || (self.in_rank_order && other.in_rank_order))
    }

    fn reductions(&self, collective: &str) -> Vec<ReduceOp> {
        match &self.algorithm {
            Algorithm::Plan(plan) => plan.plan().reductions(),
            Algorithm::BuiltIn(calls) => {
                let reduces = BuiltIn::operation(collective).is_some_and(|operation| operation.row().reduces);
                reduces.then_some(calls.op).into_iter().collect()
            }
        }
    }

    /// Why it does not serve a call, if it does not.
    pub(super) fn refusal(&self, collective: &str, dtype: DType, bytes: usize) -> Option<String> {
        let of_dtype = || {
            let names: Vec<_> = self.dtypes.iter().map(|dtype| dtype.name()).collect();
            let is_other = !names.is_empty() && !self.dtypes.contains(&dtype);
            is_other.then(|| format!("it was added for {}", names.join(", ")))
        };
        match &self.algorithm {
            Algorithm::BuiltIn(calls) => calls.refusal(collective, dtype, bytes),
            Algorithm::Plan(plan) => {
                let does = &plan.plan().collective;
                let other = (does != collective).then(|| format!("it does {}", escaped(does)));
                let of_size = || plan.serves(dtype, bytes).err().map(|error| error.to_string());
                other.or_else(of_dtype).or_else(of_size)
            }
        }
    }

    /// Whether it serves a call: as `refusal`, without a text.
    pub(super) fn serves(&self, collective: &str, dtype: DType, bytes: usize) -> bool {
        match &self.algorithm {
            Algorithm::BuiltIn(calls) => calls.serves(collective, dtype, bytes),
            Algorithm::Plan(plan) => self.does(collective, dtype) && plan.serves(dtype, bytes).is_ok(),
        }
    }

    /// What does a call, if it does the collective.
    pub(super) fn choice(&self, collective: &str) -> Option<Choice<'_>> {
        match &self.algorithm {
            Algorithm::Plan(plan) => Some(Choice::Plan(plan)),
            Algorithm::BuiltIn(calls) => calls.call(collective).map(Choice::BuiltIn),
        }
    }

    /// The least message from `bytes` bytes on that its tensors' sizes suit.
    pub(super) fn whole_message(&self, collective: &str, dtype: DType, bytes: usize) -> usize {
        match &self.algorithm {
            Algorithm::Plan(plan) => plan.whole_message(dtype, bytes),
            Algorithm::BuiltIn(calls) => bytes.next_multiple_of(calls.unit(collective, dtype)),
        }
    }

    /// The bytes of the input and of the output of a message, if it serves that.
    pub(super) fn tensor_bytes(&self, collective: &str, dtype: DType, bytes: usize) -> Option<[usize; 2]> {
        match &self.algorithm {
            Algorithm::Plan(plan) => plan.tensor_bytes(dtype, bytes).ok(),
            Algorithm::BuiltIn(calls) => calls.tensor_bytes(collective, bytes),
        }
    }

    /// Makes it ready for messages of `bytes` bytes. All ranks call it together.
    pub(super) fn prepare(
        &mut self,
        comm: &Communicator,
        collectives: &CudaCollectives,
        (collective, dtype, bytes): (&str, DType, usize),
    ) -> Result<()> {
        match &mut self.algorithm {
            Algorithm::Plan(plan) => plan.prepare(comm, dtype, bytes),
            Algorithm::BuiltIn(calls) => {
                let reduces = BuiltIn::operation(collective).is_some_and(|operation| operation.row().reduces);
                let loaded = if reduces { collectives.prepare(dtype, calls.op) } else { Ok(()) };
                comm.agree("cannot load its kernels", loaded.map_err(ExecutorError::from))
            }
        }
    }
}

/// This library's own calls as a candidate.
#[derive(Debug)]
pub(super) struct BuiltIn {
    /// How they reduce.
    pub(super) op: ReduceOp,
    pub(super) world_size: usize,
}

impl BuiltIn {
    const NAME: &'static str = "built-in";

    /// The call that does a collective, if one does.
    pub(super) fn call(&self, collective: &str) -> Option<Call<'static>> {
        Some(Call::new(Self::operation(collective)?).with_op(self.op))
    }

    fn operation(collective: &str) -> Option<Operation> {
        Plan::operation_of(collective).filter(|&operation| operation != Operation::Message)
    }

    /// The bytes of which every message is a whole number.
    fn unit(&self, collective: &str, dtype: DType) -> usize {
        let row = Self::operation(collective).map(Operation::row);
        let has_blocks = row.is_some_and(|row| [row.input, row.output].contains(&Extent::Row));
        dtype.size().max(1) * if has_blocks { self.world_size } else { 1 }
    }

    fn tensor_bytes(&self, collective: &str, bytes: usize) -> Option<[usize; 2]> {
        let row = Self::operation(collective)?.row();
        let extents = [row.input, row.output];
        let is_row = message(collective, extents) == Extent::Row;
        let block = if is_row { bytes / self.world_size } else { bytes };
        let [input, output] = extents.map(|extent| extent.elements(block, self.world_size));
        Some([input?, output?])
    }

    fn serves(&self, collective: &str, dtype: DType, bytes: usize) -> bool {
        let reduces = |operation: Operation| operation.row().reduces;
        Self::operation(collective)
            .is_some_and(|operation| !reduces(operation) || Reduction::new(dtype, self.op).is_some())
            && bytes.is_multiple_of(self.unit(collective, dtype))
    }

    fn refusal(&self, collective: &str, dtype: DType, bytes: usize) -> Option<String> {
        if self.serves(collective, dtype, bytes) {
            return None;
        }
        let unit = self.unit(collective, dtype);
        Some(match Self::operation(collective) {
            None => format!("it does not do {}", escaped(collective)),
            Some(_) if bytes.is_multiple_of(unit) => format!("it does not reduce {dtype} by {}", self.op),
            Some(_) => format!("{bytes} bytes are no multiple of {unit}"),
        })
    }
}
