//! A collection of plans, from which each call chooses one.

mod choice;
mod entry;
mod measured;

use std::{cell::RefCell, ops::RangeInclusive, time::Duration};

use antiphon_collectives::{
    AlgorithmTable,
    cuda::{Clock, CudaCollectives},
};
use antiphon_device::cuda::{Context, DeviceMemory, StreamRef};
use antiphon_fabric::{Communicator, FabricError};
use antiphon_plan::{REDUCE_OPS, ReduceOp, verify::VerifiedPlan};
use antiphon_tensor::{DType, TensorView, TensorViewMut};
use antiphon_tuning::{Key, doubling};
use sha2::{Digest, Sha256};

pub use self::choice::Choice;
use self::{
    entry::{Algorithm, BuiltIn, Entry},
    measured::Measured,
};
use super::{CudaOptions, CudaPlan, size::message};
use crate::{ExecutorError, error::Result};

/// The plans of a communicator on a GPU, and this library's own calls beside them, from which every call takes one. It is the fastest at the
/// call's size, if they were [measured](Self::tune), on this machine at any time. Else it is, in the order in which they were added, the
/// first that does the call's collective, that was added for its dtype or for all, and that [serves](CudaPlan::serves) its size. So plans
/// for narrow ranges of sizes come first.
///
/// Every rank adds the same in the same order, and so takes the same without asking the others. What takes [`CudaCollectives`] takes
/// those of the communicator on this GPU: their clock measures, and their calls are the ones that [`add_built_in`](Self::add_built_in) adds.
///
/// ```no_run
/// use antiphon_collectives::cuda::CudaCollectives;
/// use antiphon_executor::{ExecutorError, cuda::{AlgorithmCollection, CudaOptions}};
/// use antiphon_fabric::Communicator;
/// use antiphon_plan::{ReduceOp, verify::VerifiedPlan};
/// use antiphon_tensor::DType;
///
/// # fn show(comm: &Communicator, collectives: &CudaCollectives, plan: &VerifiedPlan) -> Result<(), ExecutorError> {
/// let mut plans = AlgorithmCollection::new(comm);
/// plans.add(comm, collectives.context(), plan, &[], CudaOptions::default())?;
/// plans.add_built_in(collectives, ReduceOp::Sum)?;
/// plans.tune(comm, collectives, "allreduce", DType::BF16, 1 << 10..=4 << 20)?;
/// for each in plans.explain("allreduce", DType::BF16, 1 << 20) {
///     println!("{}, {:?}: {}", each.name, each.time, each.why_not.as_deref().unwrap_or("does it"));
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct AlgorithmCollection {
    entries: Vec<Entry>,
    world_size: usize,
    allows_other_bits: bool,
    /// What is known of the entries' times.
    measured: Vec<Measured>,
}

/// What a plan of a collection, or the built-in call, has to do with a call.
#[derive(Debug)]
#[non_exhaustive]
pub struct Explained<'a> {
    /// The plan's name, or `built-in`.
    pub name: &'a str,
    /// The plan, if it is one.
    pub plan: Option<&'a CudaPlan>,
    /// How long it took, of the slowest rank, where it was measured at about this size.
    pub time: Option<Duration>,
    /// Why it does not do the call; none for the one that does it.
    pub why_not: Option<String>,
}

impl AlgorithmCollection {
    /// A collection without plans, for those of a communicator.
    pub fn new(comm: &Communicator) -> Self {
        let (entries, measured) = (Vec::new(), Vec::new());
        Self { entries, world_size: comm.world_size(), allows_other_bits: false, measured }
    }

    /// Lets a measurement choose among algorithms whose results may differ in their last bits. By default it chooses among those that reduce
    /// once and in the order of the ranks, if the first that was added does: plans whose
    /// [proof](antiphon_plan::verify::Report::in_rank_order) says so, and this library's own calls.
    #[must_use]
    pub fn allow_other_bits(self) -> Self {
        Self { allows_other_bits: true, ..self }
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
        let in_rank_order = plan.report().in_rank_order;
        let algorithm = Algorithm::Plan(Box::new(CudaPlan::load(comm, context, plan, options)?));
        self.push(Entry { algorithm, dtypes: dtypes.to_vec(), in_rank_order });
        Ok(())
    }

    /// Adds this library's own all-reduce, all-gather, reduce-scatter and all-to-all. What reduces does so by `op`, f32, f16 and bf16, once
    /// and in the order of the ranks.
    ///
    /// # Errors
    /// [`ExecutorError::Fabric`] for an `op` that plans do not have, and for collectives of another number of ranks.
    pub fn add_built_in(&mut self, collectives: &CudaCollectives, op: ReduceOp) -> Result<()> {
        let (world_size, theirs) = (self.world_size, collectives.world_size());
        if world_size != theirs {
            let text = format!("the collectives are of {theirs} ranks, the collection of {world_size}");
            return Err(FabricError::invalid(text).into());
        }
        if !REDUCE_OPS.contains(&op) {
            let known = REDUCE_OPS.map(ReduceOp::name).join(", ");
            return Err(FabricError::invalid(format!("plans reduce by {known}, not by {op}")).into());
        }
        let algorithm = Algorithm::BuiltIn(BuiltIn { op, world_size });
        self.push(Entry { algorithm, dtypes: Vec::new(), in_rank_order: true });
        Ok(())
    }

    fn push(&mut self, entry: Entry) {
        self.entries.push(entry);
        self.measured.clear(); // of another set
    }

    /// Measures what does `collective` (`allreduce`, …) with tensors of a dtype, over messages of `sizes` bytes, each twice the one
    /// before, and keeps the result in the cache file, where a collection of the same plans between such GPUs finds it. From then on calls
    /// take the fastest one. It [prepares](CudaPlan::prepare) every plan for every size that it serves, takes some seconds, and
    /// two tensors of the largest size. All ranks call it together, with nothing under way.
    ///
    /// What is not measured, as its results may have other bits than the first one's, or it reduces otherwise, says so in
    /// [`explain`](Self::explain).
    ///
    /// # Errors
    /// On all ranks: [`ExecutorError::NoPlan`] if nothing does it; [`ExecutorError::Tuning`] for a size that nothing measured
    /// serves, and when the file cannot be written; [`ExecutorError::Fabric`] when a rank has no memory for the tensors; as
    /// [`CudaPlan::prepare`] and [`CudaPlan::execute`].
    pub fn tune(
        &mut self,
        comm: &Communicator,
        collectives: &CudaCollectives,
        collective: &str,
        dtype: DType,
        sizes: RangeInclusive<usize>,
    ) -> Result<()> {
        let places = self.candidates(collective, dtype);
        if places.is_empty() {
            self.place(collective, dtype, *sizes.end())?;
        }
        let context = collectives.context();
        let largest = |&place: &usize| {
            let entry = &self.entries[place];
            let tensors = |bytes| {
                let bytes = entry.whole_message(collective, dtype, bytes);
                entry.tensor_bytes(collective, dtype, bytes)?.into_iter().max()
            };
            doubling(sizes.clone()).filter_map(tensors).max()
        };
        let largest = places.iter().filter_map(largest).max().unwrap_or(0).max(1);
        let (key, names) = (self.key(context, collective, dtype, &places)?, self.labels(&places));
        let tensor = || DeviceMemory::allocate(context, largest).map_err(ExecutorError::from);
        let tensors = tensor().and_then(|input| Ok((input, RefCell::new(tensor()?))));
        let (input, output) = comm.agree("has no memory to measure with", tensors)?;
        let clock = Clock::new(collectives, 0)?;
        let entries = &mut self.entries;
        let table = AlgorithmTable::measure(comm, &key, &names, sizes, |candidate, bytes| -> Result<_> {
            let entry = &mut entries[places[candidate]];
            let bytes = entry.whole_message(collective, dtype, bytes); // a time hardly changes with that
            let Some(counts) = entry.tensor_bytes(collective, dtype, bytes) else { return Ok(None) };
            if !entry.serves(collective, dtype, bytes) {
                return Ok(None);
            }
            entry.prepare(comm, collectives, (collective, dtype, bytes))?;
            comm.barrier()?; // hosts in step, so that no GPU waits for long
            let choice = entry.choice(collective).expect("it serves the collective");
            let call = |stream: StreamRef<'_>| {
                let shapes = counts.map(|bytes| [bytes / dtype.size()]);
                let input = input.view(dtype, &shapes[0]).expect("memory of the largest size");
                let mut output = output.borrow_mut();
                let output = output.view_mut(dtype, &shapes[1]).expect("memory of the largest size");
                // SAFETY: both memories live until the graph has been waited for.
                unsafe { choice.execute(collectives, input, output, stream) }
            };
            let time = clock.time(bytes, call)?;
            choice.check(collectives)?;
            Ok(Some(time))
        })?;
        self.measured.retain(|one| one.collective != collective || one.dtype != dtype);
        let collective = collective.to_owned();
        self.measured.push(Measured { collective, dtype, places, table: Some(table) });
        Ok(())
    }

    /// Makes ready what does `collective` (`allreduce`, …) with messages of `bytes` bytes of a dtype, as [`CudaPlan::prepare`]. A message
    /// is the output of an all-gather, else the input. The first time it looks for a [measurement](Self::tune) in the cache file, too, which is
    /// used if all ranks find the same. All ranks call it together.
    ///
    /// # Errors
    /// On all ranks: [`ExecutorError::NoPlan`]; as [`CudaPlan::prepare`] and [`CudaCollectives::prepare`].
    pub fn prepare(
        &mut self,
        comm: &Communicator,
        collectives: &CudaCollectives,
        collective: &str,
        dtype: DType,
        bytes: usize,
    ) -> Result<()> {
        self.look_for_times(comm, collectives.context(), collective, dtype)?;
        let place = self.place(collective, dtype, bytes)?;
        self.entries[place].prepare(comm, collectives, (collective, dtype, bytes))
    }

    /// What does `collective` with messages of `bytes` bytes of a dtype: a look into a table.
    ///
    /// # Errors
    /// [`ExecutorError::NoPlan`], with what each plan says.
    pub fn choose(&self, collective: &str, dtype: DType, bytes: usize) -> Result<Choice<'_>> {
        let place = self.place(collective, dtype, bytes)?;
        Ok(self.entries[place].choice(collective).expect("it serves the collective"))
    }

    /// Executes what does `collective` with these tensors, as [`CudaPlan::execute`].
    ///
    /// # Errors
    /// [`ExecutorError::NoPlan`], with what each plan says; as [`CudaPlan::execute`] and
    /// [`StreamCollectives::call`](antiphon_collectives::StreamCollectives::call).
    ///
    /// # Safety
    /// As [`CudaPlan::execute`].
    pub unsafe fn execute<'i, 'o, 's>(
        &self,
        collectives: &CudaCollectives,
        collective: &str,
        input: impl Into<TensorView<'i>>,
        output: impl Into<TensorViewMut<'o>>,
        stream: impl Into<StreamRef<'s>>,
    ) -> Result<()> {
        let (input, output) = (input.into(), output.into());
        let (dtype, bytes) = (input.dtype(), message(collective, [input.num_bytes(), output.num_bytes()]));
        let choice = self.choose(collective, dtype, bytes)?;
        // SAFETY: passed on.
        unsafe { choice.execute(collectives, input, output, stream.into()) }
    }

    /// For each plan and the built-in call, in their order, whether it does `collective` with messages of `bytes` bytes of a dtype, or why
    /// not.
    pub fn explain(&self, collective: &str, dtype: DType, bytes: usize) -> Vec<Explained<'_>> {
        let chosen = self.find(collective, dtype, bytes);
        let times = self.times(collective, dtype);
        let each = self.entries.iter().enumerate().map(|(place, entry)| {
            let time = times.and_then(|times| times.time(place, bytes));
            let why_not = entry.refusal(collective, dtype, bytes).or_else(|| {
                let chosen = chosen.filter(|&chosen| chosen != place)?;
                let name = self.entries[chosen].name();
                Some(match times.filter(|times| times.fastest(bytes) == Some(chosen)) {
                    Some(times) if times.places.contains(&place) => format!("{name:?} is faster"),
                    Some(_) => format!("it has other results than {name:?}, or may round otherwise"),
                    None => format!("{name:?} was added before it"),
                })
            });
            Explained { name: entry.name(), plan: entry.plan(), time, why_not }
        });
        each.collect()
    }

    /// The plans, in the order in which they were added.
    pub fn plans(&self) -> impl Iterator<Item = &CudaPlan> {
        self.entries.iter().filter_map(Entry::plan)
    }

    /// Whether all executions of plans that are over have done what they should, as [`CudaPlan::check`]; of built-in calls
    /// [`CudaCollectives::check`] tells that.
    ///
    /// # Errors
    /// As [`CudaPlan::check`].
    pub fn check(&self) -> Result<()> {
        self.plans().try_for_each(CudaPlan::check)
    }

    /// Gives the plans' memory back, as [`CudaPlan::free`].
    ///
    /// # Errors
    /// As [`CudaPlan::free`].
    pub fn free(self, comm: &Communicator) -> Result<()> {
        self.entries.into_iter().try_for_each(|entry| match entry.algorithm {
            Algorithm::Plan(plan) => plan.free(comm),
            Algorithm::BuiltIn(_) => Ok(()),
        })
    }

    /// The place of what does a call, if anything does.
    fn find(&self, collective: &str, dtype: DType, bytes: usize) -> Option<usize> {
        let serves = |entry: &Entry| entry.serves(collective, dtype, bytes);
        let fastest = self.times(collective, dtype).and_then(|times| times.fastest(bytes));
        let fastest = fastest.filter(|&place| serves(&self.entries[place]));
        fastest.or_else(|| self.entries.iter().position(serves))
    }

    /// As `find`.
    ///
    /// # Errors
    /// [`ExecutorError::NoPlan`]
    fn place(&self, collective: &str, dtype: DType, bytes: usize) -> Result<usize> {
        self.find(collective, dtype, bytes).ok_or_else(|| ExecutorError::NoPlan {
            collective: collective.to_owned(),
            bytes,
            dtype,
            world_size: self.world_size,
            known: self.known(collective, dtype, bytes),
        })
    }

    fn times(&self, collective: &str, dtype: DType) -> Option<&Measured> {
        self.measured.iter().find(|one| one.collective == collective && one.dtype == dtype)
    }

    /// Takes the times in the cache, unless that was done since something was added.
    fn look_for_times(
        &mut self,
        comm: &Communicator,
        context: &Context,
        collective: &str,
        dtype: DType,
    ) -> Result<()> {
        let places = self.candidates(collective, dtype);
        if self.times(collective, dtype).is_some() || places.len() < 2 {
            return Ok(());
        }
        let key = self.key(context, collective, dtype, &places)?;
        let table = AlgorithmTable::cached(comm, &key, &self.labels(&places))?;
        self.measured.push(Measured { collective: collective.to_owned(), dtype, places, table });
        Ok(())
    }

    /// The places of those among which a measurement chooses.
    fn candidates(&self, collective: &str, dtype: DType) -> Vec<usize> {
        let mut all = self.entries.iter().enumerate().filter(|(_, entry)| entry.does(collective, dtype));
        let Some((first, model)) = all.next() else { return Vec::new() };
        let is_alike = |entry: &Entry| entry.is_alike(model, collective, self.allows_other_bits);
        let others = all.filter(|(_, entry)| is_alike(entry)).map(|(place, _)| place);
        std::iter::once(first).chain(others).collect()
    }

    fn labels(&self, places: &[usize]) -> Vec<String> {
        places.iter().enumerate().map(|(at, &place)| self.entries[place].label(at)).collect()
    }

    /// The key of a table of these plans.
    fn key(&self, context: &Context, collective: &str, dtype: DType, places: &[usize]) -> Result<Key> {
        let digest = Sha256::digest(self.labels(places).join("\n"));
        let digest: String = digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        let gpu = context.device().properties()?.name;
        Ok(Key::new(format!("plans of {collective} {digest}"), dtype.name(), self.world_size, gpu))
    }

    /// What each says, none of which does a call.
    fn known(&self, collective: &str, dtype: DType, bytes: usize) -> String {
        let said = self.explain(collective, dtype, bytes);
        let said = said.iter().map(|Explained { name, why_not, .. }| {
            format!("{name:?}: {}", why_not.as_deref().unwrap_or_default())
        });
        match self.entries.is_empty() {
            true => "there are none".to_owned(),
            false => said.collect::<Vec<_>>().join("; "),
        }
    }
}
