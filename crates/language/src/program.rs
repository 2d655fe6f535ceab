//! The program.

use std::cell::RefCell;
use std::mem;
use std::panic::Location;

use antiphon_plan::{
    BufferType, ChannelType, Gpu, Plan, Protocol,
    passes::{self, ReplicationPolicy},
};

use crate::channel::{MemoryChannel, PeerChannel, PortChannel};
use crate::collective::Collective;
use crate::error::{LanguageError, Result};
use crate::rank::{Rank, Semaphore};
use crate::state::State;
use crate::switch::{SwitchChannel, SwitchEnds};

/// The parts of a program besides its operations.
///
/// The defaults are those of MSCCL++ 0.9.0: one instance, [`Protocol::Simple`], both passes on, messages of any size in
/// multiples of 16 bytes, 1,024 threads in a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// How many of each thread block there are, each with its part of every chunk.
    pub instances: u32,
    /// How instances divide the work.
    pub replication_policy: ReplicationPolicy,
    /// How data travels.
    pub protocol: Protocol,
    /// Whether neighbours become one operation where one can do the work of both.
    pub instr_fusion: bool,
    /// Whether threads are made to meet between operations of a thread block that touch the same chunks.
    pub auto_sync: bool,
    /// Whether scratch is shared with other plans.
    pub reuse_resources: bool,
    /// Threads of each thread block.
    pub num_threads_per_block: u64,
    /// Whether calls take turns between two halves of the scratch.
    pub use_double_scratch_buffer: bool,
    /// Bytes; messages are multiples of it.
    pub buffer_alignment: u64,
    /// Bytes of the smallest message.
    pub min_message_size: u64,
    /// Bytes of the largest message.
    pub max_message_size: u64,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            instances: 1,
            replication_policy: ReplicationPolicy::Interleaved,
            protocol: Protocol::Simple,
            instr_fusion: true,
            auto_sync: true,
            reuse_resources: false,
            num_threads_per_block: 1024,
            use_double_scratch_buffer: false,
            buffer_alignment: 16,
            min_message_size: 0,
            max_message_size: u64::MAX,
        }
    }
}

impl Options {
    /// The plan that [`Program::plan`] makes from a [draft](Program::draft): fused, ordered and replicated, but not checked for
    /// pairing.
    ///
    /// # Errors
    /// [`LanguageError::Plan`] if instances have no room.
    pub fn finish(&self, draft: Plan) -> Result<Plan> {
        let mut plan = draft;
        if self.instr_fusion {
            plan = passes::fuse(plan);
        }
        plan = passes::insert_data_sync(plan);
        if self.auto_sync {
            plan = passes::insert_dependency_sync(plan);
        }
        Ok(passes::replicate(plan, self.instances, self.replication_policy)?)
    }
}

/// A collective algorithm as it is written down, call by call.
///
/// Ranks, channels and semaphores that it gives out hold on to it and add to it, through shared references: a program is
/// for one thread. See the [crate's page](crate) for one from beginning to end.
pub struct Program {
    /// The plan's name.
    pub name: Option<String>,
    /// The collective's name in the plan, and whether it is in place.
    collective: (String, bool),
    /// All the rest of it.
    pub options: Options,
    pub(crate) state: RefCell<State>,
}

impl Program {
    /// A program without operations, for all ranks of the collective.
    pub fn new(name: &str, collective: &Collective, options: Options) -> Self {
        let state = RefCell::new(State::new(&collective.buffers));
        let collective = (collective.name.clone(), collective.inplace);
        Program { name: Some(name.to_owned()), collective, options, state }
    }

    /// Sets the collective's name in the plan, and whether it is in place.
    pub fn set_collective(&mut self, name: &str, inplace: bool) {
        self.collective = (name.to_owned(), inplace);
    }

    /// The number of its ranks.
    pub fn num_ranks(&self) -> u32 {
        self.state.borrow().gpus.len() as u32
    }

    /// How many thread blocks a rank has so far.
    ///
    /// # Errors
    /// [`LanguageError::NoSuchRank`].
    pub fn num_thread_blocks(&self, rank: u32) -> Result<u32> {
        self.check_rank("thread blocks", rank)?;
        Ok(self.state.borrow().gpus[rank as usize].threadblocks.len() as u32)
    }

    /// How many chunks a rank's buffer has; of scratch, so far.
    ///
    /// # Errors
    /// [`LanguageError::NoSuchRank`].
    pub fn num_chunks(&self, rank: u32, buffer: BufferType) -> Result<u64> {
        self.check_rank("chunks", rank)?;
        Ok(self.state.borrow().gpus[rank as usize].chunks(buffer))
    }

    /// One of the ranks.
    ///
    /// # Errors
    /// [`LanguageError::NoSuchRank`].
    pub fn rank(&self, rank: u32) -> Result<Rank<'_>> {
        self.check_rank("Rank", rank)?;
        Ok(Rank { program: self, rank })
    }

    /// A new channel through which `src` accesses memory of `dst`. Each call makes one, also for the same ranks.
    ///
    /// # Errors
    /// [`LanguageError::NoSuchRank`], [`LanguageError::ToItself`].
    pub fn memory_channel(&self, dst: u32, src: u32) -> Result<MemoryChannel<'_>> {
        Ok(MemoryChannel(self.peer_channel("MemoryChannel", ChannelType::Memory, dst, src)?))
    }

    /// A new channel through which an engine moves bytes from `src` to `dst`. Each call makes one, also for the same ranks.
    ///
    /// # Errors
    /// [`LanguageError::NoSuchRank`], [`LanguageError::ToItself`].
    pub fn port_channel(&self, dst: u32, src: u32) -> Result<PortChannel<'_>> {
        Ok(PortChannel(self.peer_channel("PortChannel", ChannelType::Port, dst, src)?))
    }

    fn peer_channel(
        &self,
        what: &'static str,
        channel_type: ChannelType,
        dst: u32,
        src: u32,
    ) -> Result<PeerChannel<'_>> {
        self.check_rank(what, src)?;
        self.check_rank(what, dst)?;
        if src == dst {
            return Err(LanguageError::ToItself { what, rank: src });
        }
        let id = self.state.borrow_mut().add_channel(channel_type, src, dst);
        Ok(PeerChannel { program: self, channel_type, src, dst, id })
    }

    /// A new channel through which the switch between these ranks reduces and broadcasts one of their buffers.
    ///
    /// # Errors
    /// [`LanguageError::NoSuchRank`].
    pub fn switch_channel(&self, ranks: &[u32], buffer: BufferType) -> Result<SwitchChannel<'_>> {
        ranks.iter().try_for_each(|&rank| self.check_rank("SwitchChannel", rank))?;
        let mut state = self.state.borrow_mut();
        let ids = ranks.iter().map(|&rank| (rank, state.add_switch(rank, buffer, ranks)));
        Ok(SwitchChannel { program: self, ends: SwitchEnds { buffer, ids: ids.collect() }.into() })
    }

    /// A new counting semaphore between thread blocks of a rank.
    ///
    /// # Errors
    /// [`LanguageError::NoSuchRank`].
    pub fn semaphore(&self, rank: u32, init_value: i64) -> Result<Semaphore<'_>> {
        self.check_rank("Semaphore", rank)?;
        Ok(Semaphore::new(self, rank, init_value))
    }

    /// Everything that `body` adds becomes pipelines, one for each thread block: they do it
    /// `ceil(num_chunks × bytes of a chunk / unit_size)` times, `unit_size` bytes of each chunk range at a time.
    ///
    /// # Errors
    /// [`LanguageError::NestedPipeline`], or what `body` gives; what it had added by then stays.
    #[track_caller]
    pub fn pipeline<T>(
        &self,
        unit_size: u64,
        num_chunks: u64,
        body: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        self.begin_pipeline(unit_size, num_chunks)?;
        let done = body();
        self.end_pipeline()?;
        done
    }

    /// The first half of [`pipeline`](Self::pipeline), where a closure does not fit.
    ///
    /// # Errors
    /// [`LanguageError::NestedPipeline`].
    #[track_caller]
    pub fn begin_pipeline(&self, unit_size: u64, num_chunks: u64) -> Result<()> {
        let mut state = self.state.borrow_mut();
        state.called_from(Location::caller());
        state.begin_pipeline(unit_size, num_chunks)
    }

    /// The other half.
    ///
    /// # Errors
    /// [`LanguageError::NoPipeline`].
    pub fn end_pipeline(&self) -> Result<()> {
        self.state.borrow_mut().end_pipeline()
    }

    /// Sets the line that later operations are said to come from, in place of the line that calls them. Programs that are
    /// written in another language use this.
    pub fn set_origin(&self, file: &str, line: u32) {
        self.state.borrow_mut().tell_origin(file, line);
    }

    /// The finished plan: checked for pairing, fused, ordered and replicated as the [passes] say. The program stays as it
    /// is and may go on.
    ///
    /// # Errors
    /// [`LanguageError::Plan`] if signals and waits do not match, or if instances have no room.
    pub fn plan(&self) -> Result<Plan> {
        let draft = self.draft();
        passes::check_pairing(&draft)?;
        self.options.finish(draft)
    }

    /// Checks that every signal has its wait ([`passes::check_pairing`]).
    ///
    /// # Errors
    /// [`LanguageError::Plan`] if one has none.
    pub fn check_pairing(&self) -> Result<()> {
        let gpus = mem::take(&mut self.state.borrow_mut().gpus);
        let origins = self.state.borrow().origins.clone();
        let draft = Plan { origins, ..self.with_header(gpus) };
        let checked = passes::check_pairing(&draft);
        self.state.borrow_mut().gpus = draft.gpus;
        Ok(checked?)
    }

    /// The finished plan, whether or not signals have their waits: a part of an algorithm, to look at.
    ///
    /// # Errors
    /// [`LanguageError::Plan`] if instances have no room.
    pub fn plan_unpaired(&self) -> Result<Plan> {
        self.options.finish(self.draft())
    }

    /// The plan before any pass, as the program says it.
    pub fn draft(&self) -> Plan {
        let state = self.state.borrow();
        Plan { origins: state.origins.clone(), ..self.with_header(state.gpus.clone()) }
    }

    fn with_header(&self, gpus: Vec<Gpu>) -> Plan {
        let options = &self.options;
        let (collective, inplace) = &self.collective;
        Plan {
            name: self.name.clone(),
            collective: collective.clone(),
            protocol: options.protocol,
            inplace: *inplace,
            reuse_resources: options.reuse_resources,
            gpus,
            num_threads_per_block: options.num_threads_per_block,
            use_double_scratch_buffer: options.use_double_scratch_buffer,
            buffer_alignment: options.buffer_alignment,
            min_message_size: options.min_message_size,
            max_message_size: options.max_message_size,
            origins: Vec::new(),
        }
    }

    pub(crate) fn check_rank(&self, what: &'static str, rank: u32) -> Result<()> {
        let num_ranks = self.num_ranks();
        match rank < num_ranks {
            true => Ok(()),
            false => Err(LanguageError::NoSuchRank { what, rank, num_ranks }),
        }
    }
}
