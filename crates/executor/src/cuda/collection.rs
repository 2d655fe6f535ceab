//! A collection of plans, from which each call chooses one.

use antiphon_device::cuda::{Context, StreamRef};
use antiphon_fabric::Communicator;
use antiphon_plan::{escaped, verify::VerifiedPlan};
use antiphon_tensor::{DType, TensorView, TensorViewMut};

use super::{CudaOptions, CudaPlan, size::message};
use crate::{ExecutorError, error::Result};

/// The plans of a communicator on a GPU, from which every call takes one: in the order in which they were added, the first that does its
/// collective, that was added for its dtype or for all, and that [serves](CudaPlan::serves) its size. Nothing is measured, so plans for
/// narrow ranges of sizes come first.
///
/// Every rank adds the same plans in the same order, and so takes the same without asking the others.
///
/// ```no_run
/// use antiphon_executor::{ExecutorError, cuda::AlgorithmCollection};
/// use antiphon_tensor::DType;
///
/// # fn show(plans: &AlgorithmCollection) {
/// for explained in plans.explain("allreduce", DType::BF16, 1 << 20) {
///     let name = explained.plan.plan().name.as_deref().unwrap_or_default();
///     println!("{name}: {}", explained.why_not.as_deref().unwrap_or("would do it"));
/// }
/// # }
/// ```
#[derive(Debug)]
pub struct AlgorithmCollection {
    entries: Vec<Entry>,
    world_size: usize,
}

#[derive(Debug)]
struct Entry {
    plan: CudaPlan,
    /// All, if there is none.
    dtypes: Vec<DType>,
}

/// What a plan of a collection has to do with a call.
#[derive(Debug)]
#[non_exhaustive]
pub struct Explained<'a> {
    /// The plan.
    pub plan: &'a CudaPlan,
    /// Why it does not do the call; none for the one that does it.
    pub why_not: Option<String>,
}

impl AlgorithmCollection {
    /// A collection without plans, for those of a communicator.
    pub fn new(comm: &Communicator) -> Self {
        Self { entries: Vec::new(), world_size: comm.world_size() }
    }

    /// Loads a plan, for tensors of these dtypes, or of all if none is named. All ranks call it together.
    ///
    /// # Errors
    /// As [`CudaPlan::load`].
    pub fn add(
        &mut self,
        comm: &Communicator,
        context: &Context,
        plan: &VerifiedPlan,
        dtypes: &[DType],
        options: CudaOptions,
    ) -> Result<()> {
        let plan = CudaPlan::load(comm, context, plan, options)?;
        self.entries.push(Entry { plan, dtypes: dtypes.to_vec() });
        Ok(())
    }

    /// [Prepares](CudaPlan::prepare) the plan that does `collective` (`allreduce`, …) with messages of `bytes` bytes of a dtype. A message
    /// is the output of an all-gather, else the input. All ranks call it together.
    ///
    /// # Errors
    /// On all ranks: [`ExecutorError::NoPlan`]; as [`CudaPlan::prepare`].
    pub fn prepare(
        &mut self,
        comm: &Communicator,
        collective: &str,
        dtype: DType,
        bytes: usize,
    ) -> Result<()> {
        let place = self.place(collective, dtype, bytes)?;
        self.entries[place].plan.prepare(comm, dtype, bytes)
    }

    /// [Executes](CudaPlan::execute) the plan that does `collective` with these tensors.
    ///
    /// # Errors
    /// [`ExecutorError::NoPlan`], with what each plan says; as [`CudaPlan::execute`].
    ///
    /// # Safety
    /// As [`CudaPlan::execute`].
    pub unsafe fn execute<'i, 'o, 's>(
        &self,
        collective: &str,
        input: impl Into<TensorView<'i>>,
        output: impl Into<TensorViewMut<'o>>,
        stream: impl Into<StreamRef<'s>>,
    ) -> Result<()> {
        let (input, output) = (input.into(), output.into());
        let (dtype, bytes) = (input.dtype(), message(collective, [input.num_bytes(), output.num_bytes()]));
        let place = self.place(collective, dtype, bytes)?;
        // SAFETY: passed on.
        unsafe { self.entries[place].plan.execute(input, output, stream) }
    }

    /// For each plan, in their order, whether it does `collective` with messages of `bytes` bytes of a dtype, or why not.
    pub fn explain(&self, collective: &str, dtype: DType, bytes: usize) -> Vec<Explained<'_>> {
        let mut chosen: Option<&CudaPlan> = None;
        let each = self.entries.iter().map(|entry| {
            let why_not = match (refusal(entry, collective, dtype, bytes), chosen) {
                (None, Some(first)) => Some(format!("{:?} was added before it", first.name)),
                (None, None) => {
                    chosen = Some(&entry.plan);
                    None
                }
                (refusal, _) => refusal,
            };
            Explained { plan: &entry.plan, why_not }
        });
        each.collect()
    }

    /// Whether all executions that are over have done what they should, as [`CudaPlan::check`].
    ///
    /// # Errors
    /// As [`CudaPlan::check`].
    pub fn check(&self) -> Result<()> {
        self.entries.iter().try_for_each(|entry| entry.plan.check())
    }

    /// The place of the plan that does a call.
    fn place(&self, collective: &str, dtype: DType, bytes: usize) -> Result<usize> {
        let serves = |entry: &Entry| refusal(entry, collective, dtype, bytes).is_none();
        self.entries.iter().position(serves).ok_or_else(|| ExecutorError::NoPlan {
            collective: collective.to_owned(),
            bytes,
            dtype,
            world_size: self.world_size,
            known: self.known(collective, dtype, bytes),
        })
    }

    /// What the plans say, none of which does a call.
    fn known(&self, collective: &str, dtype: DType, bytes: usize) -> String {
        let said = self.explain(collective, dtype, bytes);
        let said = said.iter().map(|Explained { plan, why_not }| {
            format!("{:?}: {}", plan.name, why_not.as_deref().unwrap_or_default())
        });
        match self.entries.is_empty() {
            true => "there are none".to_owned(),
            false => said.collect::<Vec<_>>().join("; "),
        }
    }
}

/// Why a plan does not serve a call, if it does not.
fn refusal(entry: &Entry, collective: &str, dtype: DType, bytes: usize) -> Option<String> {
    let Entry { plan, dtypes } = entry;
    let does = &plan.plan().collective;
    if does != collective {
        return Some(format!("it does {}", escaped(does)));
    }
    if !dtypes.is_empty() && !dtypes.contains(&dtype) {
        let names: Vec<_> = dtypes.iter().map(|dtype| dtype.name()).collect();
        return Some(format!("it was added for {}", names.join(", ")));
    }
    plan.serves(dtype, bytes).err().map(|error| error.to_string())
}
