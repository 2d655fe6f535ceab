//! What the dispatches and combines of all backends have.

mod gpus;
mod host;

use std::ops::{Deref, DerefMut};

use antiphon_moe::{
    ByExpertCombine, ByExpertDispatch, ByExpertRouting, Combine, Dispatch, Layout, MoeConfig, MoeError,
    RouteWords, Routing, SlotCombine, SlotDispatch,
};
use antiphon_tensor::DType;
use antiphon_testing::{Tensor, backend::Backend};

pub type Result<T> = std::result::Result<T, MoeError>;

/// What the routes of a dispatch by token say.
#[derive(Debug, PartialEq, Eq)]
pub struct ByTokenFacts {
    pub num_received: usize,
    pub overflow: bool,
    pub tokens_per_expert: Vec<usize>,
    pub rank_prefix_matrix: Vec<i32>,
    pub send_head: Vec<i32>,
}

impl ByTokenFacts {
    /// What the words of routes say.
    fn new<B: Backend>(rank: &B, words: &[i32], layout: RouteWords) -> Self {
        let (counts, world_size) = (sizes(&words[layout.counts()]), rank.world_size());
        Self {
            num_received: (0..world_size).map(|from| counts[from * world_size + rank.rank()]).sum(),
            overflow: words[layout.overflow().start] != 0,
            tokens_per_expert: sizes(&words[layout.tokens_per_expert()]),
            rank_prefix_matrix: words[layout.rank_prefix_matrix()].to_vec(),
            send_head: words[layout.send_head()].to_vec(),
        }
    }
}

fn sizes(words: &[i32]) -> Vec<usize> {
    words.iter().map(|&word| word as usize).collect()
}

/// What the routes of a dispatch by expert say.
#[derive(Debug, PartialEq, Eq)]
pub struct ByExpertFacts {
    pub num_received: usize,
    pub overflow: bool,
    pub rows_needed: usize,
    pub tokens_per_expert: Vec<usize>,
    pub rows_per_expert: Vec<usize>,
}

/// The calls of a rank. They are in order, and over when a tensor is read.
pub trait MoeBackend: Backend {
    type Moe;
    type ByTokenRoutes;
    type ByExpertRoutes;
    type SlotRoutes;
    /// The types of rows that are summed.
    const SUMMED: &'static [DType];

    fn moe(&self, config: MoeConfig) -> Result<Self::Moe>;

    /// All ranks close an instance whose calls went well.
    fn close(&self, moe: Self::Moe);

    /// An instance that all ranks close when it goes.
    fn opened(&self, config: MoeConfig) -> Opened<'_, Self> {
        Opened { rank: self, moe: Some(self.moe(config).unwrap()) }
    }

    /// The bytes of a region that holds `records` records of `bytes` bytes.
    fn region_of(&self, records: usize, bytes: usize) -> usize;

    /// The error of a call on which ranks disagree. It may come when the call is over.
    fn error_of<T>(&self, moe: &Self::Moe, outcome: Result<T>) -> MoeError;

    /// Whether an error is that of ranks that disagree, and names this. A rank that is late may hear of no more than the end of the
    /// others' call.
    fn tells(error: &MoeError, text: &str) -> bool;

    fn layout(&self, moe: &Self::Moe, ids: &Tensor<Self>, num_experts: usize) -> Result<Layout>;
    fn notify(&self, moe: &mut Self::Moe, routing: &Routing<'_>) -> Result<Self::ByTokenRoutes>;
    fn dispatch(&self, moe: &mut Self::Moe, routes: &Self::ByTokenRoutes, call: Dispatch<'_>) -> Result<()>;
    fn combine(&self, moe: &mut Self::Moe, routes: &Self::ByTokenRoutes, call: Combine<'_>) -> Result<()>;
    fn rows(routes: &Self::ByTokenRoutes) -> usize;
    fn facts(&self, routes: &Self::ByTokenRoutes) -> ByTokenFacts;
    /// The token of each row that has arrived, of routes along which rows were dispatched.
    fn source_tokens(&self, routes: &Self::ByTokenRoutes) -> Vec<i32>;

    fn notify_by_expert(
        &self,
        moe: &mut Self::Moe,
        routing: &ByExpertRouting<'_>,
    ) -> Result<Self::ByExpertRoutes>;
    fn dispatch_by_expert(
        &self,
        moe: &mut Self::Moe,
        routes: &Self::ByExpertRoutes,
        call: ByExpertDispatch<'_>,
    ) -> Result<()>;
    fn combine_by_expert(
        &self,
        moe: &mut Self::Moe,
        routes: &Self::ByExpertRoutes,
        call: ByExpertCombine<'_>,
    ) -> Result<()>;
    fn rows_by_expert(routes: &Self::ByExpertRoutes) -> usize;
    fn facts_by_expert(&self, routes: &Self::ByExpertRoutes) -> ByExpertFacts;
    /// `[N, L]`: the row of each received token for each expert, or −1; of routes along which rows were dispatched.
    fn places(&self, routes: &Self::ByExpertRoutes) -> Vec<i32>;

    fn dispatch_to_slots(&self, moe: &mut Self::Moe, call: SlotDispatch<'_>) -> Result<Self::SlotRoutes>;
    /// The tokens of each rank, where the host knows them.
    fn tokens(routes: &Self::SlotRoutes) -> Option<&[usize]>;
    fn combine_from_slots(
        &self,
        moe: &mut Self::Moe,
        routes: &Self::SlotRoutes,
        call: SlotCombine<'_>,
    ) -> Result<()>;
}

/// An instance of a rank that is closed with it.
pub struct Opened<'a, B: MoeBackend> {
    rank: &'a B,
    /// There until it is closed.
    moe: Option<B::Moe>,
}

impl<B: MoeBackend> Deref for Opened<'_, B> {
    type Target = B::Moe;

    fn deref(&self) -> &B::Moe {
        self.moe.as_ref().expect("it is open")
    }
}

impl<B: MoeBackend> DerefMut for Opened<'_, B> {
    fn deref_mut(&mut self) -> &mut B::Moe {
        self.moe.as_mut().expect("it is open")
    }
}

impl<B: MoeBackend> Drop for Opened<'_, B> {
    fn drop(&mut self) {
        // The peers of a rank that panics may not come.
        if let Some(moe) = self.moe.take().filter(|_| !std::thread::panicking()) {
            self.rank.close(moe);
        }
    }
}
