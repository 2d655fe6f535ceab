//! Executing plans on tensors that peers reach where they lie.

use std::{
    cell::RefCell,
    sync::{Arc, PoisonError},
};

use antiphon_device::{
    cuda::{Context, DevicePointer, StreamRef},
    sync::Mutex,
};
use antiphon_fabric::{
    Communicator, FabricError, RegisteredMemory, RegisteredTensor, Registry,
    gpu::{MAX_WORLD, UntilIdle},
};
use antiphon_plan::{BufferType, Rank};
use antiphon_tensor::{TensorView, TensorViewMut};

use super::{call::Shared, plan::CudaPlan};
use crate::{ExecutorError, arguments::Arguments, error::Result};

/// The memory that a communicator's plans on a GPU know.
pub(super) type SharedRegistry = Arc<UntilIdle<Mutex<Registry>>>;

/// The registries of a communicator, by the ordinals of its GPUs. They live as long as the communicator and its plans.
#[derive(Default)]
pub(super) struct Registries(RefCell<Vec<(u32, SharedRegistry)>>);

impl Registries {
    pub(super) fn of(comm: &Communicator, context: &Context) -> Result<SharedRegistry, FabricError> {
        let ordinal = context.device().ordinal();
        let registries = comm.extension(|_| Ok::<_, FabricError>(Self::default()))?;
        let mut all = registries.0.borrow_mut();
        if let Some((_, known)) = all.iter().find(|(gpu, _)| *gpu == ordinal) {
            return Ok(known.clone());
        }
        let made = Arc::new(UntilIdle::new(context, Mutex::new(Registry::default())));
        all.push((ordinal, made.clone()));
        Ok(made)
    }
}

impl CudaPlan {
    /// Lets [registered](Self::execute_registered) executions of the communicator's plans use some memory, also of plans that are
    /// loaded later. All ranks register the same memories in the same order. They are kept until they are
    /// [taken back](Self::unregister), or the communicator and its plans are dropped.
    ///
    /// # Errors
    /// [`FabricError::InvalidArgument`] for memory of another number of ranks.
    pub fn register(comm: &Communicator, memory: RegisteredMemory) -> Result<(), FabricError> {
        let context = memory.context().clone();
        let registry = Registries::of(comm, &context)?;
        let mut registry = registry.lock().unwrap_or_else(PoisonError::into_inner);
        registry.register(comm.world_size(), &context, memory)
    }

    /// Gives registered memory back, when the work of every rank's GPU is over. All ranks call it together, each with the address
    /// of its own, when no graph that has executions on it is launched any more.
    ///
    /// # Errors
    /// As [`Registry::unregister`].
    pub fn unregister(
        comm: &Communicator,
        context: &Context,
        address: DevicePointer,
    ) -> Result<(), FabricError> {
        let registry = Registries::of(comm, context)?;
        let mut registry = registry.lock().unwrap_or_else(PoisonError::into_inner);
        registry.unregister(comm, context, address)
    }

    /// [`execute`](Self::execute) on tensors of which each that peers touch lies in [registered](Self::register) memory, at the same
    /// offset on all ranks. Peers read and write them there: nothing is staged but an input that the plan itself overwrites.
    ///
    /// # Errors
    /// As [`execute`](Self::execute); [`ExecutorError::Unregistered`]. Ranks whose tensors are in different places get
    /// [`FabricError::Mismatch`] from [`check`](Self::check), as they do where some are registered and others are not.
    ///
    /// # Safety
    /// As [`execute`](Self::execute). After an error slower peers may still use what is registered.
    pub unsafe fn execute_registered<'i, 'o, 's>(
        &self,
        input: impl Into<TensorView<'i>>,
        output: impl Into<TensorViewMut<'o>>,
        stream: impl Into<StreamRef<'s>>,
    ) -> Result<()> {
        let (input, mut output) = (input.into(), output.into());
        let call = Arguments::apart(self.device(), &input, &mut output)?;
        let shared = self.find(&call)?;
        // SAFETY: the caller's promise.
        unsafe { self.run(&call, Some(shared), stream.into()) }
    }

    /// [`execute_in_place`](Self::execute_in_place) on a buffer in [registered](Self::register) memory, at the same offset on all ranks.
    ///
    /// # Errors
    /// As [`execute_in_place`](Self::execute_in_place) and [`execute_registered`](Self::execute_registered).
    ///
    /// # Safety
    /// As [`execute_registered`](Self::execute_registered).
    pub unsafe fn execute_in_place_registered<'o, 's>(
        &self,
        buffer: impl Into<TensorViewMut<'o>>,
        stream: impl Into<StreamRef<'s>>,
    ) -> Result<()> {
        let call = self.together(&mut buffer.into())?;
        let shared = self.find(&call)?;
        // SAFETY: the caller's promise.
        unsafe { self.run(&call, Some(shared), stream.into()) }
    }

    /// Where the tensors that peers touch are on all ranks.
    fn find(&self, call: &Arguments) -> Result<Shared> {
        let registry = self.registry.lock().unwrap_or_else(PoisonError::into_inner);
        let find = |which, address: usize, bytes: usize| {
            let found = registry.find(self.rank, address as u64, bytes as u64);
            found.ok_or_else(|| ExecutorError::Unregistered {
                plan: self.name.clone(),
                which,
                bytes,
                address,
            })
        };
        let (input, output) = (call.input as usize, call.output as usize);
        let (mode, bytes) = (self.mode(call.in_place), [call.input_bytes, call.output_bytes]);
        let is_shared = [0, 1].map(|tensor| mode.shares[tensor] && bytes[tensor] > 0);
        let mut at = [[0; MAX_WORLD]; 2];
        if !call.in_place {
            let find = |tensor: usize, which, address| {
                is_shared[tensor].then(|| find(which, address, bytes[tensor])).transpose()
            };
            let places = [find(0, "input", input)?, find(1, "output", output)?];
            at.iter_mut().zip(places).for_each(|(at, place)| *at = place.map_or(*at, |place| place.at));
            return Ok(Shared { at, places: RegisteredTensor::digest(places) });
        }
        let is_shared = is_shared.contains(&true);
        let buffer = is_shared.then(|| find("buffer", input.min(output), bytes[0].max(bytes[1])));
        let buffer = buffer.transpose()?;
        if let Some(buffer) = buffer {
            let chunk = bytes.iter().sum::<usize>() as u64 / self.chunks().iter().sum::<u64>().max(1);
            for (at, which) in at.iter_mut().zip([BufferType::Input, BufferType::Output]) {
                for (rank, at) in at.iter_mut().enumerate().filter(|(rank, _)| buffer.at[*rank] != 0) {
                    *at = buffer.at[rank] + mode.placements.shift(Rank(rank as u32), which) * chunk;
                }
            }
        }
        Ok(Shared { at, places: RegisteredTensor::digest([buffer, None]) })
    }
}
