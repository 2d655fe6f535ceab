//! A collection of plans, from which each call chooses one.

use std::{cell::RefCell, ops::RangeInclusive, time::Duration};

use antiphon_collectives::{
    AlgorithmTable,
    cuda::{Clock, CudaCollectives},
};
use antiphon_device::cuda::{Context, DeviceMemory, StreamRef};
use antiphon_fabric::Communicator;
use antiphon_plan::{escaped, verify::VerifiedPlan};
use antiphon_tensor::{DType, TensorView, TensorViewMut};
use antiphon_tuning::Key;
use sha2::{Digest, Sha256};

use super::{CudaOptions, CudaPlan, size::message};
use crate::{ExecutorError, error::Result};

/// The plans of a communicator on a GPU, from which every call takes one. It is the fastest at the call's size, if the plans were
/// [measured](Self::tune), on this machine at any time. Else it is, in the order in which they were added, the first that does the call's
/// collective, that was added for its dtype or for all, and that [serves](CudaPlan::serves) its size. So plans for narrow ranges of sizes
/// come first.
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
///     println!("{name}, {:?}: {}", explained.time, explained.why_not.as_deref().unwrap_or("does it"));
/// }
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

#[derive(Debug)]
struct Entry {
    plan: CudaPlan,
    /// All, if there is none.
    dtypes: Vec<DType>,
    /// Whether its proof says that it reduces once, in the order of the ranks.
    in_rank_order: bool,
}

/// The times of plans that may take each other's place.
#[derive(Debug)]
struct Measured {
    collective: String,
    dtype: DType,
    /// The places of the table's plans.
    places: Vec<usize>,
    /// Absent if the cache has none.
    table: Option<AlgorithmTable>,
}

impl Measured {
    /// The place of the fastest plan at a size.
    fn fastest(&self, bytes: usize) -> Option<usize> {
        self.table.as_ref().map(|table| self.places[table.choose(bytes)])
    }

    /// The time of a plan, at the size below `bytes` that is closest.
    fn time(&self, place: usize, bytes: usize) -> Option<Duration> {
        let rows = self.table.as_ref()?.table().rows();
        let row = rows.iter().rev().find(|row| row.bytes <= bytes).or(rows.first())?;
        let candidate = self.places.iter().position(|&one| one == place)?;
        row.timings[candidate].as_ref().map(|timing| Duration::from_nanos(timing.median_ns as u64))
    }
}

/// What a plan of a collection has to do with a call.
#[derive(Debug)]
#[non_exhaustive]
pub struct Explained<'a> {
    /// The plan.
    pub plan: &'a CudaPlan,
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

    /// Lets a measurement choose among plans whose results may differ in their last bits. By default it chooses among plans that reduce once
    /// and in the order of the ranks, as far as their [proof](antiphon_plan::verify::Report::in_rank_order) says, if the first that was added
    /// does.
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
        let plan = CudaPlan::load(comm, context, plan, options)?;
        self.entries.push(Entry { plan, dtypes: dtypes.to_vec(), in_rank_order });
        self.measured.clear(); // another set of plans
        Ok(())
    }

    /// Measures the plans that do `collective` (`allreduce`, …) with tensors of a dtype, over messages of `sizes` bytes, each twice the one
    /// before, and keeps the result in the cache file, where a collection of the same plans between such GPUs finds it. From then on calls
    /// take the fastest one. It [prepares](CudaPlan::prepare) every plan for every size that it serves, takes some seconds, and
    /// two tensors of the largest size. All ranks call it together, with nothing under way.
    ///
    /// A plan that is not measured, as its results may have other bits than the first one's, or it reduces otherwise, says so in
    /// [`explain`](Self::explain).
    ///
    /// # Errors
    /// On all ranks: [`ExecutorError::NoPlan`] without a plan that does it; [`ExecutorError::Tuning`] for a size that none of the measured
    /// plans serves, and when the file cannot be written; [`ExecutorError::Fabric`] when a rank has no memory for the tensors; as [`CudaPlan::prepare`] and [`CudaPlan::execute`].
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
        let most = |&place: &usize| {
            let plan = &self.entries[place].plan;
            plan.tensor_bytes(dtype, plan.whole_message(dtype, *sizes.end())).ok()?.into_iter().max()
        };
        let largest = places.iter().filter_map(most).max().unwrap_or(0).max(1);
        let (key, names) = (self.key(context, collective, dtype, &places)?, self.names(&places));
        let tensor = || DeviceMemory::allocate(context, largest).map_err(ExecutorError::from);
        let tensors = tensor().and_then(|input| Ok((input, RefCell::new(tensor()?))));
        let (input, output) = comm.agree("has no memory to measure with", tensors)?;
        let clock = Clock::new(collectives, 0)?;
        let entries = &mut self.entries;
        let table = AlgorithmTable::measure(comm, &key, &names, sizes, |candidate, bytes| -> Result<_> {
            let plan = &mut entries[places[candidate]].plan;
            let bytes = plan.whole_message(dtype, bytes); // a time hardly changes with that
            let Ok(counts) = plan.tensor_bytes(dtype, bytes) else { return Ok(None) };
            if plan.serves(dtype, bytes).is_err() {
                return Ok(None);
            }
            plan.prepare(comm, dtype, bytes)?;
            comm.barrier()?; // hosts in step, so that no GPU waits for long
            let call = |stream: StreamRef<'_>| {
                let shapes = counts.map(|bytes| [bytes / dtype.size()]);
                let input = input.view(dtype, &shapes[0]).expect("memory of the largest size");
                let mut output = output.borrow_mut();
                let output = output.view_mut(dtype, &shapes[1]).expect("memory of the largest size");
                // SAFETY: both memories live until the graph has been waited for.
                unsafe { plan.execute(input, output, stream) }
            };
            let time = clock.time(bytes, call)?;
            plan.check()?;
            Ok(Some(time))
        })?;
        self.measured.retain(|one| one.collective != collective || one.dtype != dtype);
        let collective = collective.to_owned();
        self.measured.push(Measured { collective, dtype, places, table: Some(table) });
        Ok(())
    }

    /// [Prepares](CudaPlan::prepare) the plan that does `collective` (`allreduce`, …) with messages of `bytes` bytes of a dtype. A message
    /// is the output of an all-gather, else the input. The first time it looks for a [measurement](Self::tune) in the cache file, too, which is
    /// used if all ranks find the same. All ranks call it together.
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
        self.look_for_times(comm, collective, dtype)?;
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
        let chosen = self.find(collective, dtype, bytes);
        let times = self.times(collective, dtype);
        let each = self.entries.iter().enumerate().map(|(place, entry)| {
            let time = times.and_then(|times| times.time(place, bytes));
            let why_not = refusal(entry, collective, dtype, bytes).or_else(|| {
                let chosen = chosen.filter(|&chosen| chosen != place)?;
                let name = &self.entries[chosen].plan.name;
                Some(match times.filter(|times| times.fastest(bytes) == Some(chosen)) {
                    Some(times) if times.places.contains(&place) => format!("{name:?} is faster"),
                    Some(_) => format!("it has other results than {name:?}, or may round otherwise"),
                    None => format!("{name:?} was added before it"),
                })
            });
            Explained { plan: &entry.plan, time, why_not }
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

    /// The place of the plan that does a call, if one does.
    fn find(&self, collective: &str, dtype: DType, bytes: usize) -> Option<usize> {
        let serves = |entry: &Entry| refusal(entry, collective, dtype, bytes).is_none();
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

    /// Takes the times in the cache, unless that was done since a plan was added.
    fn look_for_times(&mut self, comm: &Communicator, collective: &str, dtype: DType) -> Result<()> {
        let places = self.candidates(collective, dtype);
        if self.times(collective, dtype).is_some() || places.len() < 2 {
            return Ok(());
        }
        let key = self.key(self.entries[places[0]].plan.context(), collective, dtype, &places)?;
        let table = AlgorithmTable::cached(comm, &key, &self.names(&places))?;
        self.measured.push(Measured { collective: collective.to_owned(), dtype, places, table });
        Ok(())
    }

    /// The places of the plans among which a measurement chooses.
    fn candidates(&self, collective: &str, dtype: DType) -> Vec<usize> {
        let does = |entry: &Entry| {
            entry.plan.plan().collective == collective
                && (entry.dtypes.is_empty() || entry.dtypes.contains(&dtype))
        };
        let mut all = self.entries.iter().enumerate().filter(|(_, entry)| does(entry));
        let Some((first, model)) = all.next() else { return Vec::new() };
        let is_alike = |entry: &Entry| {
            entry.plan.plan().reductions() == model.plan.plan().reductions()
                && (self.allows_other_bits || (entry.in_rank_order && model.in_rank_order))
        };
        let others = all.filter(|(_, entry)| is_alike(entry)).map(|(place, _)| place);
        std::iter::once(first).chain(others).collect()
    }

    /// The names of plans in a table: with the digests, as plans may have one name.
    fn names(&self, places: &[usize]) -> Vec<String> {
        let name = |(at, &place): (usize, &usize)| {
            let plan = &self.entries[place].plan;
            format!("{} {:08x} {at}", plan.name, plan.digest)
        };
        places.iter().enumerate().map(name).collect()
    }

    /// The key of a table of these plans.
    fn key(&self, context: &Context, collective: &str, dtype: DType, places: &[usize]) -> Result<Key> {
        let digest = Sha256::digest(self.names(places).join("\n"));
        let digest: String = digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        let gpu = context.device().properties()?.name;
        Ok(Key::new(format!("plans of {collective} {digest}"), dtype.name(), self.world_size, gpu))
    }

    /// What the plans say, none of which does a call.
    fn known(&self, collective: &str, dtype: DType, bytes: usize) -> String {
        let said = self.explain(collective, dtype, bytes);
        let said = said.iter().map(|Explained { plan, why_not, .. }| {
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
    let Entry { plan, dtypes, .. } = entry;
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
