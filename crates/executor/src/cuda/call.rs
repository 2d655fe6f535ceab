//! Executing plans.

use antiphon_device::cuda::{GaveUp, StreamRef, memory};
use antiphon_fabric::{
    FabricError, Signature,
    gpu::{Family as _, Grid, Launch, MAX_WORLD, Pieces, Tenant, Work},
};
use antiphon_plan::{BufferType, Extent, Rank};
use antiphon_tensor::{TensorError, TensorView, TensorViewMut};

use super::{
    bases::Bases,
    family::{Entry, PlanCall},
    plan::{CudaPlan, check_room},
    prepared::{Copy, Key, Prepared},
    report::waiting,
    tenants::lock,
};
use crate::{ExecutorError, arguments::Arguments, error::Result};

/// Tensors that peers reach.
#[derive(Clone, Copy)]
pub(super) struct Shared {
    /// The addresses of all ranks' inputs and outputs; 0 where peers touch none.
    pub(super) at: [[u64; MAX_WORLD]; 2],
    /// A digest of their places, which must be equal on all ranks.
    pub(super) places: u32,
}

impl CudaPlan {
    /// Executes the plan on an input and an output: contiguous tensors of one dtype on this rank's GPU, apart from each other. All
    /// ranks call it together, with tensors of the same sizes. It returns at once; the stream does the work, behind the plans of
    /// this communicator that were executed before, on whatever stream.
    ///
    /// # Errors
    /// See [`ExecutorError`]. Tensors that do not fit are refused before anything happens, as is a size that was not
    /// [prepared](Self::prepare). An earlier failure is returned as by [`check`](Self::check).
    ///
    /// # Safety
    /// The tensors' memory is valid until the stream has passed the call, and nothing else uses it until then but work of the
    /// stream's order. A framework's stream lives until the next plan of the communicator is executed.
    pub unsafe fn execute<'i, 'o, 's>(
        &self,
        input: impl Into<TensorView<'i>>,
        output: impl Into<TensorViewMut<'o>>,
        stream: impl Into<StreamRef<'s>>,
    ) -> Result<()> {
        let (input, mut output) = (input.into(), output.into());
        let call = Arguments::apart(self.device(), &input, &mut output)?;
        // SAFETY: the caller's promise.
        unsafe { self.run(&call, None, stream.into()) }
    }

    /// [`execute`](Self::execute) with one buffer for input and output. If one is larger, the buffer is that one, and the other is
    /// this rank's own part of it.
    ///
    /// # Errors
    /// As [`execute`](Self::execute); [`Buffers`](ExecutorError::Buffers) if neither is a whole number of times the other.
    ///
    /// # Safety
    /// As [`execute`](Self::execute).
    pub unsafe fn execute_in_place<'o, 's>(
        &self,
        buffer: impl Into<TensorViewMut<'o>>,
        stream: impl Into<StreamRef<'s>>,
    ) -> Result<()> {
        let call = self.together(&mut buffer.into())?;
        // SAFETY: the caller's promise.
        unsafe { self.run(&call, None, stream.into()) }
    }

    /// Input and output in one buffer.
    pub(super) fn together(&self, buffer: &mut TensorViewMut<'_>) -> Result<Arguments> {
        let mode = self.checked.in_place(&self.name)?;
        let shift = |buffer| mode.placements.shift(Rank(self.rank as u32), buffer);
        let shifts = [shift(BufferType::Input), shift(BufferType::Output)];
        Arguments::together(self.device(), buffer, self.chunks(), shifts)
    }

    /// Whether all executions that are over have done what they should. It does not wait: synchronise with the stream first.
    ///
    /// # Errors
    /// [`ExecutorError::Stuck`], with the operation that waited in vain; [`Fabric`](ExecutorError::Fabric) for a rank that did not
    /// come, or did something else, and from then on.
    pub fn check(&self) -> Result<()> {
        let tenant = lock(&self.tenant);
        tenant.check().map_err(|error| self.explain(&tenant, error))
    }

    /// Puts a call into a stream. What peers touch of its tensors is `shared`, or staged.
    ///
    /// # Safety
    /// As [`execute`](Self::execute).
    pub(super) unsafe fn run(
        &self,
        call: &Arguments,
        shared: Option<Shared>,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        let element = call.dtype.size();
        for (which, address) in [("input", call.input as usize), ("output", call.output as usize)] {
            if !address.is_multiple_of(element) {
                let source = TensorError::Misaligned { address, dtype: call.dtype, align: element };
                return Err(ExecutorError::Tensor { which, source });
            }
        }
        let extent = Extent::new(&self.plan, call.input_bytes as u64, call.output_bytes as u64)?;
        let key = Key { dtype: call.dtype, chunk: extent.chunk() as usize, in_place: call.in_place };
        let prepared = self.memory.prepared.iter().find(|prepared| prepared.key == key);
        let prepared = prepared.ok_or_else(|| ExecutorError::Unprepared {
            plan: self.name.clone(),
            dtype: call.dtype,
            bytes: self.message_bytes(call.input_bytes, call.output_bytes),
        })?;
        let tenant = lock(&self.tenant);
        // SAFETY: the caller's promise.
        unsafe { self.launch(&tenant, prepared, call, shared, stream) }
    }

    /// # Safety
    /// As [`execute`](Self::execute).
    unsafe fn launch(
        &self,
        tenant: &Tenant,
        prepared: &Prepared,
        call: &Arguments,
        shared: Option<Shared>,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        let explain = |error| self.explain(tenant, error);
        let [staged_input, staged_output, staging] = prepared.staging;
        let places = shared.map(|shared| shared.places);
        let shared = shared.map_or([staged_input, staged_output], |shared| shared.at);
        let bases = Bases::new([call.input as u64, call.output as u64], shared, staging);
        let blocks = prepared.part(0).program.blocks.len().max(1);
        let family = &prepared.part(0).family;
        tenant.ready(family.clone(), stream).map_err(explain)?;
        // A stream may have some of the multiprocessors only.
        check_room(&self.plan, blocks, self.per_multiprocessor, tenant.multiprocessors_here())?;
        let copy_all = |copies: &[Copy]| {
            let outcome = copies.iter().try_for_each(|copy| {
                let [from, to] = [copy.from, copy.to].map(|item| bases.address(item));
                match from == to || copy.bytes == 0 {
                    true => Ok(()),
                    // SAFETY: both ends hold the chunks: the tensors are as long as the plan's buffers, and staging has room for them.
                    false => unsafe { memory::copy(stream, to, from, copy.bytes) },
                }
            });
            outcome.or_else(|error| tenant.fail(error.into())).map_err(explain)
        };
        copy_all(&prepared.loads)?;
        if let Some(engines) = &self.memory.engines {
            engines.wake();
        }
        for number in 0..prepared.slicing.launches() {
            let bases = bases.behind(number * prepared.slicing.slice);
            let family = &prepared.part(number).family;
            let loaded = tenant.load_entered(family.clone(), stream).map_err(explain)?;
            let launch = |_, _, _| Launch {
                kernel: Entry::Execute,
                grid: Grid::Exact {
                    config: family.blocks(blocks as u32, tenant.world_size()),
                    is_small: true, // it takes at most half of what runs at once
                },
                work: Work::new(prepared.signature(number, places)),
                arguments: PlanCall {
                    bases: bases.0,
                    places: places.unwrap_or(0).into(),
                    ..prepared.part(number).call
                },
            };
            // SAFETY: the table's addresses are those of this plan's memory, which lives until the context is idle, of the caller's
            // tensors, and of memory that is registered; the blocks were found to fit.
            unsafe { tenant.run(&loaded, Pieces { total: 1, most: 1, unit: 1 }, stream, launch) }
                .map_err(explain)?;
        }
        copy_all(&prepared.stores)
    }

    /// The error of a kernel of this plan that gave up, with the operation.
    fn explain(&self, tenant: &Tenant, error: FabricError) -> ExecutorError {
        let failed = self.memory.engines.as_ref().and_then(|engines| engines.failed());
        if let Some(failed) = failed {
            return FabricError::from(failed.clone()).into();
        }
        let report = tenant.report().filter(|report| {
            let waited = matches!(report.reason, GaveUp::Deadline | GaveUp::Aborted) && report.seen[1] > 0;
            waited && !matches!(error, FabricError::Failed { .. })
        });
        let stuck = report.and_then(|report| {
            let doing = Signature::from_words(report.doing)?;
            let part = self.memory.prepared.iter().find_map(|prepared| prepared.part_of(&doing))?;
            // Each half of the scratch has all steps.
            let step = usize::try_from(report.seen[1] - 1).ok()? % part.origins.len().max(1);
            let origin = *part.origins.get(step)?;
            waiting(&self.plan, Rank(self.rank as u32), &part.program, origin?, &report)
        });
        match stuck {
            Some((place, waiting)) => ExecutorError::Stuck { place, waiting, reason: error.into() },
            None => error.into(),
        }
    }
}
