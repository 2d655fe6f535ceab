//! Ranks that are killed, or do not come, in the middle of a dispatch or a combine: the others hear of it.

use std::time::Duration;

use antiphon_fabric::{Communicator, FabricError, LocalWorld};
use antiphon_moe::{
    ByExpertCombine, ByExpertDispatch, ByExpertOrder, ByExpertRoutes, ByExpertRouting, ByExpertTokens,
    ByTokenRoutes, Combine, CombineFormat, Dispatch, Moe, MoeConfig, MoeError, ReceivedSlots, Routing,
    RowFormat, SlotCombine, SlotDispatch, SlotFormat, SlotRoutes, Tokens, layout,
};
use antiphon_tensor::{DType, TensorView, TensorViewMut, bf16};
use antiphon_testing::{VICTIMS, World, kill_each, role, say, say_error};

const HIDDEN: usize = 1024;
/// The deadline where a rank is late.
const TIMEOUT: Duration = Duration::from_millis(500);
/// What ends the role of ranks of which one is late.
const LATE: &str = ", late";

/// A rank with tokens that all go everywhere, `count` of them.
struct Rank<'a> {
    comm: &'a Communicator,
    moe: Moe,
    tokens: Vec<f32>,
    ids: Vec<i64>,
}

impl<'a> Rank<'a> {
    fn new(comm: &'a Communicator, count: usize) -> Result<Self, MoeError> {
        let ids = (0..count).flat_map(|_| 0..comm.world_size() as i64).collect();
        let moe = Moe::new(comm, MoeConfig { region_bytes: 1 << 20, ..MoeConfig::default() })?;
        Ok(Self { comm, moe, tokens: vec![1.0; count * HIDDEN], ids })
    }

    fn notify(&mut self) -> Result<ByTokenRoutes, MoeError> {
        let world_size = self.comm.world_size();
        let ids = TensorView::new(&self.ids, &[self.ids.len() / world_size, world_size])?;
        let layout = layout(&ids, world_size, world_size)?;
        let format = RowFormat { hidden: HIDDEN, dtype: DType::F32, scales: None };
        self.moe.notify(self.comm, &Routing::of(&layout, format))
    }

    fn dispatch(&mut self, routes: &ByTokenRoutes) -> Result<Vec<f32>, MoeError> {
        let mut received = vec![0.0; routes.rows() * HIDDEN];
        let call = Dispatch {
            tokens: Tokens::of(TensorView::new(&self.tokens, &[routes.num_tokens(), HIDDEN])?),
            received: Tokens::of(TensorViewMut::new(&mut received, &[routes.rows(), HIDDEN])?),
        };
        self.moe.dispatch(self.comm, routes, call)?;
        Ok(received)
    }

    fn combine(&mut self, routes: &ByTokenRoutes, rows: &[f32]) -> Result<(), MoeError> {
        let mut sums = vec![0.0; self.tokens.len()];
        let output = TensorViewMut::new(&mut sums, &[routes.num_tokens(), HIDDEN])?;
        let call = Combine::of(TensorView::new(rows, &[routes.rows(), HIDDEN])?, output);
        self.moe.combine(self.comm, routes, call)?;
        assert!(sums.iter().all(|&sum| sum == self.comm.world_size() as f32));
        Ok(())
    }

    /// Sends some tokens to the slots of all experts; what comes.
    fn dispatch_to_slots(&mut self) -> Result<(SlotRoutes, Vec<bf16>), MoeError> {
        const TOKENS: usize = 64;
        let world_size = self.comm.world_size();
        let slots = world_size * TOKENS;
        let x = vec![bf16::from_f32(1.0); TOKENS * HIDDEN];
        let mut rows = vec![bf16::from_f32(0.0); slots * HIDDEN];
        let (mut counts, mut source_tokens, mut layout_range) =
            ([0i32], vec![0i32; slots], vec![0i64; world_size]);
        let call = SlotDispatch {
            max_tokens: TOKENS,
            num_experts: world_size,
            format: SlotFormat::Bf16,
            x: TensorView::new(&x, &[TOKENS, HIDDEN])?,
            ids: TensorView::new(&self.ids[..TOKENS * world_size], &[TOKENS, world_size])?,
            received: ReceivedSlots {
                x: TensorViewMut::new(&mut rows, &[1, slots, HIDDEN])?,
                scales: None,
                counts: TensorViewMut::new(&mut counts, &[1])?,
                source_tokens: TensorViewMut::new(&mut source_tokens, &[1, slots])?,
                layout_range: TensorViewMut::new(&mut layout_range, &[1, world_size])?,
                statistics: None,
                waits: None,
            },
        };
        let routes = self.moe.dispatch_to_slots(self.comm, call)?;
        assert_eq!(counts, [slots as i32]);
        Ok((routes, rows))
    }

    fn combine_from_slots(&mut self, routes: &SlotRoutes, rows: &[bf16]) -> Result<(), MoeError> {
        let (tokens, world_size) = (routes.num_tokens(), self.comm.world_size());
        let weights = vec![1f32; tokens * world_size];
        let mut sums = vec![bf16::from_f32(0.0); tokens * HIDDEN];
        let call = SlotCombine {
            format: CombineFormat::Bf16,
            rows: TensorView::new(rows, &[1, rows.len() / HIDDEN, HIDDEN])?,
            ids: TensorView::new(&self.ids[..tokens * world_size], &[tokens, world_size])?,
            weights: TensorView::new(&weights, &[tokens, world_size])?,
            output: TensorViewMut::new(&mut sums, &[tokens, HIDDEN])?,
            waits: None,
        };
        self.moe.combine_from_slots(self.comm, routes, call)?;
        assert!(sums.iter().all(|sum| sum.to_f32() == world_size as f32));
        Ok(())
    }

    /// Every token chooses the expert of each rank.
    fn notify_by_expert(&mut self) -> Result<ByExpertRoutes, MoeError> {
        let map = vec![1u8; self.ids.len()];
        let world_size = self.comm.world_size();
        let routing = ByExpertRouting {
            map: TensorView::new(&map, &[map.len() / world_size, world_size])?,
            order: ByExpertOrder::Experts { pad_multiple: 16, capacity: None },
            format: RowFormat { hidden: HIDDEN, dtype: DType::F32, scales: None },
        };
        self.moe.notify_by_expert(self.comm, &routing)
    }

    fn dispatch_by_expert(&mut self, routes: &ByExpertRoutes) -> Result<Vec<f32>, MoeError> {
        let mut received = vec![0.0; routes.rows() * HIDDEN];
        let call = ByExpertDispatch {
            tokens: ByExpertTokens::of(TensorView::new(&self.tokens, &[routes.num_tokens(), HIDDEN])?),
            received: ByExpertTokens::of(TensorViewMut::new(&mut received, &[routes.rows(), HIDDEN])?),
        };
        self.moe.dispatch_by_expert(self.comm, routes, call)?;
        Ok(received)
    }

    fn combine_by_expert(&mut self, routes: &ByExpertRoutes, rows: &[f32]) -> Result<(), MoeError> {
        let mut sums = vec![0.0; self.tokens.len()];
        let output = TensorViewMut::new(&mut sums, &[routes.num_tokens(), HIDDEN])?;
        let call = ByExpertCombine::of(TensorView::new(rows, &[routes.rows(), HIDDEN])?, output);
        self.moe.combine_by_expert(self.comm, routes, call)?;
        assert!(sums.iter().all(|&sum| sum == self.comm.world_size() as f32));
        Ok(())
    }

    /// Goes on until something is wrong. With `is_late` rank 1 comes late to two rounds, and not at all to the third.
    fn work(&mut self, role: &str, is_late: bool) -> Result<(), MoeError> {
        let routes = self.notify()?;
        let rows = self.dispatch(&routes)?;
        for round in 0.. {
            if is_late && self.comm.rank() == 1 {
                std::thread::sleep(if round < 2 { TIMEOUT / 4 } else { 2 * TIMEOUT });
            }
            match role {
                "notify" => drop(self.notify()?),
                "dispatch" => drop(self.dispatch(&routes)?),
                "combine" => self.combine(&routes, &rows)?,
                "slots" => {
                    let (routes, rows) = self.dispatch_to_slots()?;
                    self.combine_from_slots(&routes, &rows)?;
                }
                _ => {
                    let routes = self.notify_by_expert()?;
                    let rows = self.dispatch_by_expert(&routes)?;
                    self.combine_by_expert(&routes, &rows)?;
                }
            }
            if is_late {
                say(format_args!("round {round}"));
            }
        }
        Ok(())
    }
}

/// What a rank does when this binary is started as one.
#[test]
fn rank_process() {
    let Some(role) = role() else { return };
    let comm = Communicator::from_env().unwrap();
    let mut rank = Rank::new(&comm, 2000).unwrap();
    say("ready");
    let (form, is_late) = role.strip_suffix(LATE).map_or((&*role, false), |form| (form, true));
    match rank.work(form, is_late) {
        Err(MoeError::Fabric(error)) => say_error(&error),
        other => say(format_args!("{other:?}")),
    }
}

/// A rank that comes late costs its lateness, and one that does not come the deadline.
#[test]
fn late_processes_are_waited_for_until_the_deadline() {
    for form in ["notify", "dispatch", "combine", "slots", "by expert"] {
        let world = World::start(2, &format!("{form}{LATE}"), true, TIMEOUT);
        for round in 0..2 {
            assert_eq!(
                [0, 1].map(|rank| world.hear(rank).1),
                [(); 2].map(|()| format!("round {round}")),
                "{form}"
            );
        }
        assert_eq!(world.hear(0).1, "timeout [1]", "{form}");
        world.end(&[]);
    }
}

#[test]
fn killed_in_notify() {
    kill_each(&VICTIMS[..2], "notify", Duration::from_millis(100));
}

#[test]
fn killed_in_dispatch() {
    kill_each(&VICTIMS[..4], "dispatch", Duration::from_millis(200));
}

#[test]
fn killed_in_combine() {
    kill_each(&VICTIMS[..4], "combine", Duration::from_millis(200));
}

#[test]
fn killed_in_the_slots_form() {
    kill_each(&VICTIMS[..2], "slots", Duration::from_millis(150));
}

#[test]
fn killed_in_the_form_by_expert() {
    kill_each(&VICTIMS[..2], "by expert", Duration::from_millis(200));
}

#[test]
fn late_ranks_of_the_form_by_expert_are_waited_for_until_the_deadline() {
    let outcomes = LocalWorld::run_with(2, Duration::from_millis(600), |comm| {
        let late = |time| std::thread::sleep(Duration::from_millis(if comm.rank() == 1 { time } else { 0 }));
        let mut rank = Rank::new(&comm, 3)?;
        late(100);
        let routes = rank.notify_by_expert()?;
        late(100);
        let rows = rank.dispatch_by_expert(&routes)?;
        late(100);
        rank.combine_by_expert(&routes, &rows)?;
        late(2000);
        rank.combine_by_expert(&routes, &rows)
    });
    let Err(MoeError::Fabric(error)) = &outcomes[0] else { panic!("{outcomes:?}") };
    assert!(matches!(error, FabricError::Timeout { missing, .. } if missing == &[1]), "{error}");
    let text = "combine_by_expert(rows of 1024 × f32 as call 1 routed them, 2 experts) timed out";
    assert!(error.to_string().starts_with(text), "{error}");
}

#[test]
fn late_ranks_of_the_slots_form_are_waited_for_until_the_deadline() {
    let outcomes = LocalWorld::run_with(2, Duration::from_millis(600), |comm| {
        let late = |time| std::thread::sleep(Duration::from_millis(if comm.rank() == 1 { time } else { 0 }));
        let mut rank = Rank::new(&comm, 64)?;
        late(100);
        let (routes, rows) = rank.dispatch_to_slots()?;
        late(100);
        rank.combine_from_slots(&routes, &rows)?;
        late(2000);
        rank.combine_from_slots(&routes, &rows)
    });
    let Err(MoeError::Fabric(error)) = &outcomes[0] else { panic!("{outcomes:?}") };
    assert!(matches!(error, FabricError::Timeout { missing, .. } if missing == &[1]), "{error}");
    let text = "combine_from_slots(rows of 1024 × bf16 as call 1 routed them, 2 experts, top-2) timed out";
    assert!(error.to_string().starts_with(text), "{error}");
}

/// A rank that comes late costs its lateness, and one that does not come the deadline.
#[test]
fn late_ranks_are_waited_for_until_the_deadline() {
    let outcomes = LocalWorld::run_with(2, Duration::from_millis(600), |comm| {
        let late = |time| std::thread::sleep(Duration::from_millis(if comm.rank() == 1 { time } else { 0 }));
        let mut rank = Rank::new(&comm, 3)?;
        late(100);
        let routes = rank.notify()?;
        late(100);
        let rows = rank.dispatch(&routes)?;
        late(100);
        rank.combine(&routes, &rows)?;
        late(2000);
        rank.combine(&routes, &rows)
    });
    let Err(MoeError::Fabric(error)) = &outcomes[0] else { panic!("{outcomes:?}") };
    assert!(matches!(error, FabricError::Timeout { missing, .. } if missing == &[1]), "{error}");
    let text = "combine(rows of 1024 × f32 as call 1 routed them, 2 experts) timed out";
    assert!(error.to_string().starts_with(text), "{error}");
}

#[test]
fn by_expert_routes_of_different_calls_are_a_mismatch() {
    let outcomes = LocalWorld::run_with(2, Duration::from_secs(5), |comm| {
        let mut rank = Rank::new(&comm, 3)?;
        let routes = [rank.notify_by_expert()?, rank.notify_by_expert()?];
        rank.dispatch_by_expert(&routes[comm.rank()])
    });
    for outcome in outcomes {
        let error = outcome.unwrap_err();
        assert!(
            matches!(error, MoeError::Fabric(FabricError::Mismatch { .. } | FabricError::Aborted { .. })),
            "{error}"
        );
    }
}

/// Ranks that use routes of different calls hear of it before a row is read.
#[test]
fn routes_of_different_calls_are_a_mismatch() {
    let outcomes = LocalWorld::run_with(2, Duration::from_secs(5), |comm| {
        let mut rank = Rank::new(&comm, 3)?;
        let routes = [rank.notify()?, rank.notify()?];
        rank.dispatch(&routes[comm.rank()])
    });
    for outcome in outcomes {
        let error = outcome.unwrap_err();
        assert!(
            matches!(error, MoeError::Fabric(FabricError::Mismatch { .. } | FabricError::Aborted { .. })),
            "{error}"
        );
    }
}
