//! Ranks whose tensors lie in host memory.

use antiphon_fabric::FabricError;
use antiphon_moe::{
    ByExpertCombine, ByExpertDispatch, ByExpertRoutes, ByExpertRouting, ByTokenRoutes, Combine, Dispatch,
    Layout, Moe, MoeConfig, MoeError, RouteWords, Routing, SlotCombine, SlotDispatch, SlotRoutes, layout,
};
use antiphon_tensor::DType;
use antiphon_testing::{
    Tensor,
    backend::{Host, Ranks},
};

use super::{ByExpertFacts, ByTokenFacts, MoeBackend, Result};

impl<R: Ranks> MoeBackend for Host<R> {
    type Moe = Moe;
    type ByTokenRoutes = ByTokenRoutes;
    type ByExpertRoutes = ByExpertRoutes;
    type SlotRoutes = SlotRoutes;
    const SUMMED: &'static [DType] = &[DType::F32, DType::F16, DType::BF16, DType::F64];

    fn moe(&self, config: MoeConfig) -> Result<Moe> {
        Moe::new(self, config)
    }

    fn close(&self, moe: Moe) {
        moe.close(self).unwrap();
    }

    /// Records begin at multiples of 16 bytes.
    fn region_of(&self, records: usize, bytes: usize) -> usize {
        records * bytes.next_multiple_of(16)
    }

    fn error_of<T>(&self, _moe: &Moe, outcome: Result<T>) -> MoeError {
        outcome.err().expect("the ranks disagree")
    }

    fn tells(error: &MoeError, text: &str) -> bool {
        matches!(error, MoeError::Fabric(FabricError::Mismatch { .. } | FabricError::Aborted { .. }))
            && error.to_string().contains(text)
    }

    fn layout(&self, _moe: &Moe, ids: &Tensor<Self>, num_experts: usize) -> Result<Layout> {
        layout(&ids.view(), num_experts, self.world_size())
    }

    fn notify(&self, moe: &mut Moe, routing: &Routing<'_>) -> Result<ByTokenRoutes> {
        moe.notify(self, routing)
    }

    fn dispatch(&self, moe: &mut Moe, routes: &ByTokenRoutes, call: Dispatch<'_>) -> Result<()> {
        moe.dispatch(self, routes, call)
    }

    fn combine(&self, moe: &mut Moe, routes: &ByTokenRoutes, call: Combine<'_>) -> Result<()> {
        moe.combine(self, routes, call)
    }

    fn rows(routes: &ByTokenRoutes) -> usize {
        routes.rows()
    }

    fn facts(&self, routes: &ByTokenRoutes) -> ByTokenFacts {
        let layout = RouteWords::new(self.world_size(), routes.num_experts(), routes.num_tokens());
        let facts = ByTokenFacts::new(self, &routes.parts(), layout);
        assert_eq!((facts.num_received, facts.overflow), (routes.num_received(), routes.overflow()));
        assert_eq!(facts.tokens_per_expert, routes.tokens_per_expert());
        facts
    }

    fn source_tokens(&self, routes: &ByTokenRoutes) -> Vec<i32> {
        routes.source_tokens().expect("rows were dispatched")
    }

    fn notify_by_expert(&self, moe: &mut Moe, routing: &ByExpertRouting<'_>) -> Result<ByExpertRoutes> {
        moe.notify_by_expert(self, routing)
    }

    fn dispatch_by_expert(
        &self,
        moe: &mut Moe,
        routes: &ByExpertRoutes,
        call: ByExpertDispatch<'_>,
    ) -> Result<()> {
        moe.dispatch_by_expert(self, routes, call)
    }

    fn combine_by_expert(
        &self,
        moe: &mut Moe,
        routes: &ByExpertRoutes,
        call: ByExpertCombine<'_>,
    ) -> Result<()> {
        moe.combine_by_expert(self, routes, call)
    }

    fn rows_by_expert(routes: &ByExpertRoutes) -> usize {
        routes.rows()
    }

    fn facts_by_expert(&self, routes: &ByExpertRoutes) -> ByExpertFacts {
        ByExpertFacts {
            num_received: routes.num_received(),
            overflow: routes.overflow(),
            rows_needed: routes.rows_needed(),
            tokens_per_expert: routes.tokens_per_expert().to_vec(),
            rows_per_expert: routes.rows_per_expert().to_vec(),
        }
    }

    fn places(&self, routes: &ByExpertRoutes) -> Vec<i32> {
        routes.places().expect("rows were dispatched").to_vec()
    }

    fn dispatch_to_slots(&self, moe: &mut Moe, call: SlotDispatch<'_>) -> Result<SlotRoutes> {
        moe.dispatch_to_slots(self, call)
    }

    fn tokens(routes: &SlotRoutes) -> Option<&[usize]> {
        Some(routes.tokens())
    }

    fn combine_from_slots(&self, moe: &mut Moe, routes: &SlotRoutes, call: SlotCombine<'_>) -> Result<()> {
        moe.combine_from_slots(self, routes, call)
    }
}
