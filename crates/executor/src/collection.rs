//! A collection of plans, from which each call chooses one.

use antiphon_fabric::Communicator;
use antiphon_plan::{Extent, Plan, escaped, verify::VerifiedPlan};
use antiphon_tensor::{DType, TensorView, TensorViewMut};

use crate::{ExecutorError, LoadedPlan, Options, error::Result};

/// The plans of a communicator, from which every call takes one: in the order in which they were added, the first that
/// does its collective, whose limits, alignment and proof fit the sizes of its tensors, and that was added for their dtype or
/// for all. Nothing is measured and nothing preferred beyond that order, so plans for narrow ranges of sizes come first.
///
/// Every rank adds the same plans in the same order, and so takes the same without asking the others.
#[derive(Debug, Default)]
pub struct AlgorithmCollection(Vec<Entry>);

#[derive(Debug)]
struct Entry {
    plan: LoadedPlan,
    /// All, if there is none.
    dtypes: Vec<DType>,
}

impl Entry {
    /// Why the plan does not do a call, if it does not.
    fn refusal(&self, collective: &str, [input, output]: [usize; 2], dtype: DType) -> Option<String> {
        let plan = self.plan.plan();
        if plan.collective != collective {
            return Some(format!("it does {}", escaped(&plan.collective)));
        }
        if !self.dtypes.is_empty() && !self.dtypes.contains(&dtype) {
            let names: Vec<_> = self.dtypes.iter().map(|dtype| dtype.name()).collect();
            return Some(format!("it was added for {}", names.join(", ")));
        }
        let fits = Extent::new(plan, input as u64, output as u64).map_err(ExecutorError::from);
        let fits = fits.and_then(|extent| self.plan.most(&extent, dtype.size()).map(drop));
        fits.err().map(|error| error.to_string())
    }
}

impl AlgorithmCollection {
    /// A collection without plans.
    pub fn new() -> Self {
        Self::default()
    }

    /// Loads a plan, for tensors of these dtypes, or of all if none is named. All ranks call it together.
    ///
    /// # Errors
    /// As [`LoadedPlan::load`].
    pub fn add(
        &mut self,
        comm: &Communicator,
        plan: &VerifiedPlan,
        dtypes: &[DType],
        options: Options,
    ) -> Result<()> {
        let plan = LoadedPlan::load(comm, plan, options)?;
        self.0.push(Entry { plan, dtypes: dtypes.to_vec() });
        Ok(())
    }

    /// The first plan that does `collective` (`allreduce`, …) with an input and an output of these sizes in bytes.
    ///
    /// # Errors
    /// [`ExecutorError::NoPlan`], with what each plan serves.
    pub fn select(
        &mut self,
        comm: &Communicator,
        collective: &str,
        [input, output]: [usize; 2],
        dtype: DType,
    ) -> Result<&mut LoadedPlan> {
        match self.place(collective, [input, output], dtype) {
            Some(place) => Ok(&mut self.0[place].plan),
            None => Err(ExecutorError::NoPlan {
                collective: collective.to_owned(),
                bytes: input.max(output),
                dtype,
                world_size: comm.world_size(),
                known: self.known(),
            }),
        }
    }

    /// [Selects](Self::select) a plan and [executes](LoadedPlan::execute) it.
    ///
    /// # Errors
    /// As these two.
    pub fn execute<'i, 'o>(
        &mut self,
        comm: &Communicator,
        collective: &str,
        input: impl Into<TensorView<'i>>,
        output: impl Into<TensorViewMut<'o>>,
    ) -> Result<()> {
        let (input, output) = (input.into(), output.into());
        let bytes = [input.num_bytes(), output.num_bytes()];
        self.select(comm, collective, bytes, input.dtype())?.execute(comm, input, output)
    }

    /// For each plan, in their order, why it does not do `collective` with an input and an output of these sizes in bytes; none for the one
    /// that does it.
    pub fn explain(&self, collective: &str, bytes: [usize; 2], dtype: DType) -> Vec<(&Plan, Option<String>)> {
        let chosen = self.place(collective, bytes, dtype);
        let explained = self.0.iter().enumerate().map(|(place, entry)| {
            let why_not = entry.refusal(collective, bytes, dtype).or_else(|| {
                let first = chosen.filter(|&chosen| chosen != place)?;
                let name = self.0[first].plan.plan().name.as_deref().unwrap_or("?");
                Some(format!("{name:?} was added before it"))
            });
            (entry.plan.plan(), why_not)
        });
        explained.collect()
    }

    /// Gives the plans' symmetric memory back. All ranks call it together.
    ///
    /// # Errors
    /// As [`LoadedPlan::free`].
    pub fn free(self, comm: &Communicator) -> Result<()> {
        self.0.into_iter().try_for_each(|entry| entry.plan.free(comm))
    }

    fn place(&self, collective: &str, bytes: [usize; 2], dtype: DType) -> Option<usize> {
        self.0.iter().position(|entry| entry.refusal(collective, bytes, dtype).is_none())
    }

    fn known(&self) -> String {
        let describe = |entry: &Entry| {
            let plan = entry.plan.plan();
            let (name, limits) = (plan.name.as_deref().unwrap_or("?"), limits(plan));
            let dtypes: Vec<_> = entry.dtypes.iter().map(|dtype| dtype.name()).collect();
            let dtypes = if dtypes.is_empty() { String::new() } else { format!(" of {}", dtypes.join("/")) };
            format!("{name:?} does {} of {limits} bytes{dtypes}", escaped(&plan.collective))
        };
        match self.0.is_empty() {
            true => "there are none".to_owned(),
            false => self.0.iter().map(describe).collect::<Vec<_>>().join("; "),
        }
    }
}

fn limits(plan: &antiphon_plan::Plan) -> String {
    match (plan.min_message_size, plan.max_message_size) {
        (0, u64::MAX) => "any number of".to_owned(),
        (min, u64::MAX) => format!("at least {min}"),
        (min, max) => format!("{min} to {max}"),
    }
}
