//! Running a loaded plan.
//!
//! A call is one launch of the plan's program, or several. Where a message needs staging or scratch, a launch handles a
//! slice of every chunk, so that staged data stays in the cache and the workspace is bounded for any message. (A plan that is
//! right for chunks is right for equal parts of them.) A launch never handles more of a chunk than the plan is proved
//! for. Ranks synchronise before every launch and after the last one. There they notice calls that do not match, and after a call
//! has returned no rank accesses another's memory.

use std::convert::Infallible;

use antiphon_device::host::reduce::Reducer;
use antiphon_fabric::{ArenaOffsets, Communicator, Operation, Rounds, Signature, Written};
use antiphon_plan::{Extent, REDUCE_OPS};
use antiphon_tensor::DType;

use super::{
    addresses::{Areas, RankAddresses, Slice, Tensors, offsets},
    load::{Key, LoadedPlan},
    machine::{Launch, Stuck},
    memory::{SharedWorkspace, Workspace},
};
use crate::{
    ExecutorError,
    arguments::Arguments,
    error::Result,
    layout::{Base, Layout, Mode, Ports, Slicing, Target, compile, most_proved, slot, unit},
};

/// Bytes of a tensor, or of scratch, that go through a launch: few enough to stay in the cache, and enough for a launch's
/// rounds and signals to be worth their while.
const STAGE: usize = 1 << 20;
/// Bytes of the least slice of a chunk, so that steps are worth their while.
const LEAST_SLICE: usize = 4 << 10;
/// Programs that are kept.
const MOST_PROGRAMS: usize = 64;

impl LoadedPlan {
    pub(super) fn run(&mut self, comm: &Communicator, call: &Arguments) -> Result<()> {
        if !self.sync.buffer().belongs_to(comm) {
            return Err(ExecutorError::OtherCommunicator { plan: self.name.clone() });
        }
        if self.reduces {
            let numeric = call.dtype.numeric();
            numeric.map_err(|source| ExecutorError::Tensor { which: "tensor", source })?;
        }
        let extent = Extent::new(&self.plan, call.input_bytes as u64, call.output_bytes as u64)?;
        // Chunks are parts of tensors, and so fit into memory.
        let mut slicing = Slicing { chunk: extent.chunk() as usize, slice: extent.chunk() as usize };
        let most = self.most(&extent, call.dtype.size())?;
        let slice = self.slice(&extent).min(most);
        let signature = self.signature(call);
        if slicing.chunk > slice {
            slicing.slice = if self.can_be_whole(comm, call, &signature)? { most } else { slice };
        }
        self.make_ready(comm, call, &extent, slicing, &signature)?;
        match self.workspace.take() {
            Some(mut workspace) => {
                let done = self.launch_all(comm, call, slicing, &signature, &mut workspace);
                self.workspace = Some(workspace);
                done
            }
            None => {
                let shared = shared(comm);
                self.launch_all(comm, call, slicing, &signature, &mut shared.0.borrow_mut())
            }
        }
    }

    fn signature(&self, call: &Arguments) -> Signature {
        Signature {
            dtype: Some(call.dtype),
            algorithm: call.in_place.into(),
            detail: self.digest,
            count: (call.input_bytes / call.dtype.size()) as u64,
            ..Signature::new(Operation::ExecutePlan)
        }
    }

    /// Most bytes of a chunk that a launch may handle: whole elements, of what is proved.
    ///
    /// # Errors
    /// [`ExecutorError::Unproved`]
    pub(crate) fn most(&self, extent: &Extent, element: usize) -> Result<usize> {
        most_proved(&self.name, self.largest_chunk, extent, element)
    }

    /// Bytes of a slice of a chunk, for messages that are cut.
    fn slice(&self, extent: &Extent) -> usize {
        let gpu = &self.plan.gpus[self.rank];
        let chunks = gpu.input_chunks.max(gpu.output_chunks).max(self.checked.scratch_chunks).max(1);
        let unit = unit(extent, 1, true);
        let wanted = (STAGE as u64 / chunks).max(LEAST_SLICE as u64);
        let slice = (wanted / unit).max(1).saturating_mul(unit);
        usize::try_from(slice).unwrap_or(usize::MAX)
    }

    /// Whether nothing of a large message is staged on any rank, nor goes through scratch: then it need not be cut.
    fn can_be_whole(&self, comm: &Communicator, call: &Arguments, signature: &Signature) -> Result<bool> {
        // SAFETY: every rank posts where its tensors are, as `ArenaOffsets`.
        let mut rounds = unsafe { comm.rounds()? };
        let written = offsets(call, &rounds).put(&rounds);
        rounds.exchange(signature, written)?;
        let whole = |rank| offsets_of(&rounds, rank).all_symmetric();
        Ok(self.checked.scratch_chunks == 0 && (0..rounds.world_size()).all(whole))
    }

    fn areas(&self, chunk: usize) -> Result<Areas> {
        let gpu = &self.plan.gpus[self.rank];
        let times = |count: u64, bytes: usize| usize::try_from(count).ok()?.checked_mul(bytes);
        let areas = || {
            let staged_input = times(gpu.input_chunks, chunk)?.checked_next_multiple_of(64)?;
            let output = times(gpu.output_chunks, chunk)?.checked_next_multiple_of(64)?;
            let plain = times(self.checked.scratch_chunks, chunk)?.checked_next_multiple_of(64)?;
            let packets = if self.checked.uses_packets { Layout::packets(chunk)? } else { 0 };
            let scratch = plain.checked_add(times(self.checked.scratch_chunks, packets)?)?;
            let double = self.plan.use_double_scratch_buffer;
            Some(Areas { staged_input, staging: staged_input.checked_add(output)?, plain, scratch, double })
        };
        areas().ok_or_else(|| ExecutorError::Buffers {
            plan: self.name.clone(),
            what: format!(
                "{} chunks of scratch of {chunk} bytes exceed the memory",
                self.checked.scratch_chunks
            ),
        })
    }

    /// Sees to it that there are programs and room for a call. Only the first one of its kind has anything to do.
    fn make_ready(
        &mut self,
        comm: &Communicator,
        call: &Arguments,
        extent: &Extent,
        slicing: Slicing,
        signature: &Signature,
    ) -> Result<()> {
        let last = slicing.len(slicing.launches() - 1);
        let keys = [slicing.slice, last].map(|chunk| Key::new(call, slicing, chunk));
        let areas = self.areas(slicing.slice)?;
        let scratch = areas.scratch.saturating_mul(1 + usize::from(areas.double));
        let staging = if self.mode(call).may_stage { areas.staging.saturating_mul(2) } else { 0 };
        let known = |key: &Key| self.programs.iter().any(|(known, _)| known == key);
        let has_room = match &self.workspace {
            Some(workspace) => workspace.has_room(staging, scratch),
            None => shared(comm).0.borrow().has_room(staging, scratch),
        };
        if keys.iter().all(known) && has_room {
            return Ok(());
        }
        // A rank that calls something else must get that as its error, and not a missing allocation.
        // SAFETY: nothing but the signature is posted.
        unsafe { comm.rounds()? }.exchange(signature, Written::nothing(0))?;
        let compiled = keys.iter().try_for_each(|key| self.add_program(*key, extent));
        comm.agree("cannot execute its plan", compiled)?;
        match &mut self.workspace {
            Some(workspace) => workspace.reserve(comm, staging, scratch)?,
            None => shared(comm).0.borrow_mut().reserve(comm, staging, scratch)?,
        }
        Ok(())
    }

    fn add_program(&mut self, key: Key, extent: &Extent) -> Result<()> {
        if self.programs.iter().any(|(known, _)| *known == key) {
            return Ok(());
        }
        let placements = &self.checked.modes[usize::from(key.in_place)]
            .as_ref()
            .expect("calls in place are possible")
            .placements;
        let program = compile(Target {
            plan: &self.plan,
            wiring: &self.wiring,
            placements,
            rank: self.rank,
            packets: self.packets,
            ports: Ports::Blocks,
            element: key.element,
            extent: extent.part(key.chunk as u64),
            sliced: key.sliced,
        })?;
        self.machine.reserve(&program);
        if self.programs.len() >= MOST_PROGRAMS {
            self.programs.remove(0);
        }
        self.programs.push((key, program));
        Ok(())
    }

    /// Launch after launch. Ranks meet before each, with what is staged in place; when they meet again, what was staged
    /// before can be fetched, for staging has two halves.
    fn launch_all(
        &mut self,
        comm: &Communicator,
        call: &Arguments,
        slicing: Slicing,
        signature: &Signature,
        workspace: &mut Workspace,
    ) -> Result<()> {
        let areas = self.areas(slicing.slice)?;
        // SAFETY: the first round carries where the tensors are, the others nothing.
        let mut rounds = unsafe { comm.rounds()? };
        let own = Tensors::own(&rounds, call);
        let mut previous: Option<(Slice, RankAddresses)> = None;
        for number in 0..slicing.launches() {
            let slice = Slice { slicing, areas, number, flag: workspace.next_flag() };
            let addresses = slice.addresses(self.rank, &own, workspace);
            slice.move_all(&self.mode(call).loads, &addresses);
            let written = if number == 0 { offsets(call, &rounds).put(&rounds) } else { Written::nothing(0) };
            rounds.exchange(signature, written)?;
            if let Some((slice, addresses)) = previous {
                slice.move_all(&self.mode(call).stores, &addresses);
            }
            self.resolve_addresses(&slice, &rounds, workspace, addresses);
            self.launch(comm, &slice, call, signature)?;
            previous = Some((slice, addresses));
        }
        rounds.exchange(signature, Written::nothing(0))?;
        if let Some((slice, addresses)) = previous {
            slice.move_all(&self.mode(call).stores, &addresses);
        }
        Ok(())
    }

    fn mode(&self, call: &Arguments) -> &Mode {
        self.checked.modes[usize::from(call.in_place)].as_ref().expect("calls in place are possible")
    }

    /// Fills in the addresses of every rank's chunks.
    fn resolve_addresses(
        &mut self,
        slice: &Slice,
        rounds: &Rounds,
        workspace: &Workspace,
        own: RankAddresses,
    ) {
        for rank in 0..rounds.world_size() {
            if slice.number == 0 {
                self.offsets[rank] = offsets_of(rounds, rank);
            }
            let addresses = match rank == self.rank {
                true => own,
                false => {
                    slice.addresses(rank, &Tensors::of_peer(rounds, rank, self.offsets[rank]), workspace)
                }
            };
            self.addresses[slot(rank, Base::Input)..][..Base::COUNT].copy_from_slice(&addresses);
        }
    }

    fn launch(
        &mut self,
        comm: &Communicator,
        slice: &Slice,
        call: &Arguments,
        signature: &Signature,
    ) -> Result<()> {
        let key = Key::new(call, slice.slicing, slice.len());
        let program = self.programs.iter().find(|(known, _)| *known == key).map(|(_, program)| program);
        let monitor = comm.monitor();
        // Of a dtype without arithmetic there is no reduction.
        let reduced = call.dtype.numeric().unwrap_or(DType::U8);
        let launch = Launch {
            rank: self.rank,
            program: program.expect("programs were made ready"),
            addresses: &self.addresses,
            sync: &self.sync,
            flag: slice.flag,
            packets: self.packets,
            reducers: REDUCE_OPS.map(|op| Reducer::new(reduced, op)),
            element: call.dtype.size(),
            patience: monitor.patience(),
        };
        let check = |waited, awaited: &dyn Fn() -> Vec<usize>| {
            monitor.check_interrupt(*signature)?;
            monitor.check(*signature)?;
            monitor.answer(*signature, awaited, waited);
            if waited < monitor.timeout() {
                return Ok(());
            }
            Err(monitor.timed_out(*signature, waited, awaited()))
        };
        self.machine.run(&launch, check).map_err(|stuck| {
            let Stuck { place, waiting, reason } = *stuck;
            monitor.report(&reason);
            ExecutorError::Stuck { place, waiting, reason: reason.into() }
        })
    }
}

impl Key {
    fn new(call: &Arguments, slicing: Slicing, chunk: usize) -> Self {
        Key { chunk, sliced: slicing.cuts(), element: call.dtype.size(), in_place: call.in_place }
    }
}

/// The workspace that several plans of a communicator share.
fn shared(comm: &Communicator) -> &SharedWorkspace {
    let made = comm.extension(|_| Ok::<_, Infallible>(SharedWorkspace::default()));
    made.unwrap_or_else(|never| match never {})
}

/// The arena offsets of a rank's tensors, in the round in which ranks post them.
fn offsets_of(rounds: &Rounds, rank: usize) -> ArenaOffsets<2> {
    // SAFETY: every rank posts its offsets in this round.
    unsafe { ArenaOffsets::of_rank(rounds, rank) }
}
