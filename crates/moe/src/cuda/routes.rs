//! The routes of a dispatch by token between GPUs, and where they lie.

use std::{ops::Range, sync::Arc};

use antiphon_device::sync::AtomicU32;
use antiphon_tensor::{DType, Device, TensorViewMut};

use crate::{error::Result, pool::Pooled, routes::Traffic, tensors::Name, words::RouteWords};

/// The memory of a part of routes on the GPU.
pub(crate) enum Memory {
    /// Memory of the instance.
    Pooled(Pooled),
    /// The caller's, who keeps it as long as the routes are used.
    Callers(u64),
}

impl Memory {
    pub(crate) fn address(&self) -> u64 {
        match self {
            Self::Pooled(memory) => memory.pointer().0,
            Self::Callers(address) => *address,
        }
    }
}

/// The words of routes, and the memory of these.
pub(crate) struct Plan {
    pub(crate) memory: Memory,
    pub(crate) words: RouteWords,
}

impl Plan {
    /// The address of some of the words.
    pub(crate) fn at(&self, words: impl Fn(&RouteWords) -> Range<usize>) -> u64 {
        self.memory.address() + words(&self.words).start as u64 * 4
    }
}

/// The routes of a dispatch by token between GPUs, made by [`CudaMoe::notify`](super::CudaMoe::notify).
pub struct CudaByTokenRoutes {
    pub(super) owner: Arc<()>,
    pub(crate) number: u32,
    pub(crate) num_experts: usize,
    pub(crate) top_k: usize,
    pub(super) rows: usize,
    pub(super) arrived: Option<Arrived>,
    pub(crate) plan: Plan,
    pub(super) sources: Memory,
    pub(super) has_rows: AtomicU32,
}

/// The counts of all ranks, once the host has waited for them.
pub(crate) struct Arrived {
    pub(crate) traffic: Traffic,
    pub(crate) tokens_per_expert: Vec<usize>,
}

impl std::fmt::Debug for CudaByTokenRoutes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "CudaByTokenRoutes {{ number: {}, rows: {}, {:?} }}",
            self.number, self.rows, self.plan.words
        )
    }
}

impl CudaByTokenRoutes {
    /// How many rows the received tensors have: those that arrive, or the capacity.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// How many rows arrive. `None` with a capacity, where only the GPU knows.
    pub fn num_received(&self) -> Option<usize> {
        self.arrived.as_ref().map(|arrived| arrived.traffic.kept_at(arrived.traffic.rank))
    }

    /// How many tokens this rank dispatches.
    pub fn num_tokens(&self) -> usize {
        self.plan.words.tokens()
    }

    /// How many experts there are.
    pub fn num_experts(&self) -> usize {
        self.num_experts
    }

    /// How many experts each token chooses.
    pub fn top_k(&self) -> usize {
        self.top_k
    }

    /// How often all ranks' tokens chose each of this rank's experts: `[L]`. `None` with a capacity, where only the GPU knows:
    /// [`RouteWords::tokens_per_expert`](crate::RouteWords::tokens_per_expert).
    pub fn tokens_per_expert(&self) -> Option<&[usize]> {
        self.arrived.as_ref().map(|arrived| &*arrived.tokens_per_expert)
    }

    /// Keeps the token of each row in the caller's memory, i32 `[N]`, from now on.
    ///
    /// # Errors
    /// [`MoeError`](crate::MoeError) for a tensor of another dtype, shape or device.
    ///
    /// # Safety
    /// The memory is used for nothing else as long as the routes are used, or a graph that has calls along them.
    pub unsafe fn keep_sources_in(&mut self, sources: TensorViewMut<'_>, device: Device) -> Result<()> {
        let name = Name { call: "dispatch", which: "sources" };
        let view = sources.as_view();
        name.has_dtype(view.dtype(), &[DType::I32])?;
        name.has_shape(&view, &[self.rows], "[N]")?;
        self.sources = Memory::Callers(name.address(&view, device)?);
        Ok(())
    }

    /// Where the token of each row stands.
    pub(crate) fn sources(&self) -> u64 {
        self.sources.address()
    }
}

/// The memory for the parts of routes on the GPU.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "it is made for one call, and not kept")]
pub enum RouteMemory<'a> {
    /// Memory of the instance, which gets it back when the routes are dropped.
    Own,
    /// The caller's tensors, i32. Without a capacity, the caller passes the sources later, by [`CudaByTokenRoutes::keep_sources_in`].
    Callers {
        /// `[RouteWords::total()]`: the words.
        words: TensorViewMut<'a>,
        /// `[N]`: the token of each row, if there is a capacity of `N` rows.
        sources: Option<TensorViewMut<'a>>,
    },
}
