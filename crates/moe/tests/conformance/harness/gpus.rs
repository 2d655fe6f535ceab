//! Ranks that have a GPU each.

use std::time::{Duration, Instant};

use antiphon_device::{DeviceError, cuda::CudaError};
use antiphon_fabric::FabricError;
use antiphon_moe::{
    ByExpertCombine, ByExpertDispatch, ByExpertRouting, Combine, Dispatch, Layout, MoeConfig, MoeError,
    RouteWords, Routing, SlotCombine, SlotDispatch,
    by_expert::cuda::{ByExpertWords, CudaByExpertRoutes},
    cuda::{CudaByTokenRoutes, CudaMoe, RouteMemory},
    slots::cuda::CudaSlotRoutes,
};
use antiphon_tensor::DType;
use antiphon_testing::{
    Tensor,
    backend::{self, Backend},
};

use super::{ByExpertFacts, ByTokenFacts, MoeBackend, Result, sizes};

/// A rank with tensors in the memory of its GPU.
pub type Gpus = backend::Gpus;

/// Routes, with the tensors in which they lie.
pub struct ByTokenRoutes {
    routes: CudaByTokenRoutes,
    words: Tensor<Gpus>,
    sources: Tensor<Gpus>,
}

/// As [`ByTokenRoutes`].
pub struct ByExpertRoutes {
    routes: CudaByExpertRoutes,
    words: Tensor<Gpus>,
    places: Tensor<Gpus>,
}

fn integers(bytes: &[u8]) -> Vec<i32> {
    bytes.chunks(4).map(|word| i32::from_ne_bytes(word.try_into().unwrap())).collect()
}

/// Waits until the rank's calls are over.
fn wait_for(rank: &Gpus) -> Result<()> {
    let failed = |error: CudaError| FabricError::from(DeviceError::from(error));
    Ok(rank.stream().synchronize().map_err(failed)?)
}

// Tensors and routes go back to pools whose memory calls of the same stream use next, or to the driver when the rank is over.
impl MoeBackend for Gpus {
    type Moe = CudaMoe;
    type ByTokenRoutes = ByTokenRoutes;
    type ByExpertRoutes = ByExpertRoutes;
    type SlotRoutes = CudaSlotRoutes;
    const SUMMED: &'static [DType] = &[DType::F32, DType::F16, DType::BF16];

    fn moe(&self, config: MoeConfig) -> Result<CudaMoe> {
        CudaMoe::new(self, self.context(), config)
    }

    /// Its memory goes when no rank's kernel uses it.
    fn close(&self, moe: CudaMoe) {
        wait_for(self).unwrap();
        moe.check().unwrap();
        self.barrier().unwrap();
    }

    /// Records begin at multiples of 128 bytes; there is a ring for each peer in each of three slots.
    fn region_of(&self, records: usize, bytes: usize) -> usize {
        3 * (self.world_size() - 1).max(1) * records * bytes.next_multiple_of(128)
    }

    fn error_of<T>(&self, moe: &CudaMoe, outcome: Result<T>) -> MoeError {
        let Ok(_kept) = outcome else { return outcome.err().expect("it is no success") };
        wait_for(self).unwrap();
        // A kernel that needed nothing from the peer that disagrees has ended well.
        let start = Instant::now();
        loop {
            match moe.check() {
                Ok(()) => assert!(start.elapsed() < Duration::from_secs(20), "the ranks disagree"),
                Err(error) => return error,
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn tells(error: &MoeError, text: &str) -> bool {
        let error = error.to_string();
        error.contains(text) || error.contains("aborted")
    }

    fn layout(&self, moe: &CudaMoe, ids: &Tensor<Self>, num_experts: usize) -> Result<Layout> {
        let world_size = self.world_size();
        let tokens = ids.shape()[0];
        let mut per_rank = Tensor::unwritten(self, DType::I32, &[world_size]);
        let mut per_expert = Tensor::unwritten(self, DType::I32, &[num_experts]);
        let mut in_rank = Tensor::unwritten(self, DType::U8, &[tokens, world_size]);
        let outputs = [&mut per_rank.view_mut(), &mut per_expert.view_mut(), &mut in_rank.view_mut()];
        // SAFETY: the tensors live until they have been read, or go back to the pool, here and below.
        unsafe { moe.layout(&ids.view(), outputs, self.stream()) }?;
        Ok(Layout {
            num_experts,
            top_k: ids.shape()[1],
            tokens_per_rank: integers(&per_rank.content()),
            tokens_per_expert: integers(&per_expert.content()),
            is_token_in_rank: in_rank.content(),
        })
    }

    fn notify(&self, moe: &mut CudaMoe, routing: &Routing<'_>) -> Result<ByTokenRoutes> {
        let layout =
            RouteWords::new(self.world_size(), routing.num_experts, routing.is_token_in_rank.shape()[0]);
        let mut words = Tensor::unwritten(self, DType::I32, &[layout.total()]);
        let sources = |rows| Tensor::unwritten(self, DType::I32, &[rows]);
        let mut held = routing.capacity.map(sources);
        let memory =
            RouteMemory::Callers { words: words.view_mut(), sources: held.as_mut().map(Tensor::view_mut) };
        // SAFETY: as above; the routes go with the tensors.
        let mut routes = unsafe { moe.notify(routing, memory, self.stream()) }?;
        let sources = match held {
            Some(sources) => sources,
            None => {
                let mut sources = sources(routes.rows());
                // SAFETY: as above.
                unsafe { routes.keep_sources_in(sources.view_mut(), self.device()) }?;
                sources
            }
        };
        Ok(ByTokenRoutes { routes, words, sources })
    }

    fn dispatch(&self, moe: &mut CudaMoe, routes: &ByTokenRoutes, call: Dispatch<'_>) -> Result<()> {
        // SAFETY: as above.
        unsafe { moe.dispatch(&routes.routes, call, self.stream()) }
    }

    fn combine(&self, moe: &mut CudaMoe, routes: &ByTokenRoutes, call: Combine<'_>) -> Result<()> {
        // SAFETY: as above.
        unsafe { moe.combine(&routes.routes, call, self.stream()) }
    }

    fn rows(routes: &ByTokenRoutes) -> usize {
        routes.routes.rows()
    }

    fn facts(&self, routes: &ByTokenRoutes) -> ByTokenFacts {
        let ByTokenRoutes { routes, words, .. } = routes;
        let layout = RouteWords::new(self.world_size(), routes.num_experts(), routes.num_tokens());
        let facts = ByTokenFacts::new(self, &integers(&words.content()), layout);
        // What the host has waited for.
        assert!(routes.num_received().is_none_or(|count| count == facts.num_received));
        assert!(routes.tokens_per_expert().is_none_or(|counts| counts == facts.tokens_per_expert));
        facts
    }

    fn source_tokens(&self, routes: &ByTokenRoutes) -> Vec<i32> {
        let mut tokens = integers(&routes.sources.content());
        tokens.truncate(self.facts(routes).num_received);
        tokens
    }

    fn notify_by_expert(&self, moe: &mut CudaMoe, routing: &ByExpertRouting<'_>) -> Result<ByExpertRoutes> {
        let (tokens, num_experts) = match *routing.map.shape() {
            [tokens, num_experts] => (tokens, num_experts),
            _ => (0, 0), // which is refused
        };
        let layout = ByExpertWords::new(self.world_size(), num_experts, tokens);
        let mut words = Tensor::unwritten(self, DType::I32, &[layout.total()]);
        let memory = RouteMemory::Callers { words: words.view_mut(), sources: None };
        // SAFETY: as above; the routes go with the tensors.
        let mut routes = unsafe { moe.notify_by_expert(routing, memory, self.stream()) }?;
        let local = num_experts / self.world_size();
        let mut places = Tensor::unwritten(self, DType::I32, &[routes.places(), local]);
        // SAFETY: as above.
        unsafe { routes.keep_places_in(places.view_mut(), self.device()) }?;
        Ok(ByExpertRoutes { routes, words, places })
    }

    fn dispatch_by_expert(
        &self,
        moe: &mut CudaMoe,
        routes: &ByExpertRoutes,
        call: ByExpertDispatch<'_>,
    ) -> Result<()> {
        // SAFETY: as above.
        unsafe { moe.dispatch_by_expert(&routes.routes, call, self.stream()) }
    }

    fn combine_by_expert(
        &self,
        moe: &mut CudaMoe,
        routes: &ByExpertRoutes,
        call: ByExpertCombine<'_>,
    ) -> Result<()> {
        // SAFETY: as above.
        unsafe { moe.combine_by_expert(&routes.routes, call, self.stream()) }
    }

    fn rows_by_expert(routes: &ByExpertRoutes) -> usize {
        routes.routes.rows()
    }

    fn facts_by_expert(&self, routes: &ByExpertRoutes) -> ByExpertFacts {
        let ByExpertRoutes { routes, words, .. } = routes;
        let layout = ByExpertWords::new(self.world_size(), routes.num_experts(), routes.num_tokens());
        let words = integers(&words.content());
        let facts = ByExpertFacts {
            num_received: words[layout.num_received().start] as usize,
            overflow: words[layout.overflow().start] != 0,
            rows_needed: words[layout.rows_needed().start] as usize,
            tokens_per_expert: sizes(&words[layout.tokens_per_expert()]),
            rows_per_expert: sizes(&words[layout.rows_per_expert()]),
        };
        // What the host has waited for.
        assert!(routes.num_received().is_none_or(|count| count == facts.num_received));
        assert!(routes.tokens_per_expert().is_none_or(|counts| counts == facts.tokens_per_expert));
        assert!(routes.rows_per_expert().is_none_or(|counts| counts == facts.rows_per_expert));
        facts
    }

    fn places(&self, routes: &ByExpertRoutes) -> Vec<i32> {
        let mut places = integers(&routes.places.content());
        places.truncate(self.facts_by_expert(routes).num_received * routes.places.shape()[1]);
        places
    }

    fn dispatch_to_slots(&self, moe: &mut CudaMoe, call: SlotDispatch<'_>) -> Result<CudaSlotRoutes> {
        // SAFETY: as above.
        unsafe { moe.slots()?.dispatch(&call, self.stream()) }
    }

    fn tokens(_routes: &CudaSlotRoutes) -> Option<&[usize]> {
        None
    }

    fn combine_from_slots(
        &self,
        moe: &mut CudaMoe,
        routes: &CudaSlotRoutes,
        call: SlotCombine<'_>,
    ) -> Result<()> {
        // SAFETY: as above.
        unsafe { moe.slots()?.combine(routes, &call, self.stream()) }
    }
}
