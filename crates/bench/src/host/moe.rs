//! Dispatch and combine of a mixture of experts. The size is that of a rank's tokens, in rows of up to 14336 bytes.

use antiphon::{
    collectives::Communicator,
    moe::{
        ByTokenRoutes, Combine, Dispatch, Layout, Moe, MoeConfig, MoeError, Routing, RowFormat, Tokens,
        layout,
    },
    tensor::{Element, TensorView, TensorViewMut},
};

use crate::{
    Contender, Result, Wrong,
    case::{Case, Collective},
    pattern::{self, exactly},
};

pub(crate) const ABOUT_DISPATCH: &str = "Tokens to the ranks of their experts: of 8 for each rank, two for each token; counts are exchanged in each call";
pub(crate) const ABOUT_COMBINE: &str = "What those ranks made of tokens, back and summed";

/// Bytes of a row, at most: 7168 elements of 16 bits.
const ROW_BYTES: usize = 14_336;
/// The bytes of a vector. A row is a whole number of vectors.
const VECTOR: usize = 16;
pub(crate) const LOCAL_EXPERTS: usize = 8;
pub(crate) const TOP_K: usize = 2;

/// Tokens of a rank, and elements of each.
pub(crate) fn shape(case: &Case) -> [usize; 2] {
    let bytes = (case.bytes as usize / VECTOR * VECTOR).clamp(VECTOR, ROW_BYTES);
    [(case.bytes as usize / bytes).max(1), bytes / case.dtype.size()]
}

/// Elements of a rank's tokens, and of what it gets at most: every token of every rank.
pub(crate) fn counts(case: &Case, world_size: usize) -> (usize, usize) {
    let [tokens, hidden] = shape(case);
    match case.collective {
        Collective::DISPATCH => (tokens * hidden, tokens * hidden * world_size),
        _ => (tokens * hidden * world_size, tokens * hidden),
    }
}

/// The experts that a rank's tokens choose.
pub(crate) fn choices(rank: usize, tokens: usize, experts: usize) -> Vec<i64> {
    let expert = |token: usize, k: usize| (token * 2_654_435_761 + rank * 40_503 + k * 7919) >> 5;
    (0..tokens).flat_map(|token| (0..TOP_K).map(move |k| (expert(token, k) % experts) as i64)).collect()
}

/// The layouts of all ranks' choices, which every rank can compute.
pub(crate) fn layouts(tokens: usize, world_size: usize) -> Result<Vec<Layout>, MoeError> {
    let experts = LOCAL_EXPERTS * world_size;
    let of = |rank| {
        let ids = choices(rank, tokens, experts);
        layout(&TensorView::new(&ids, &[tokens, TOP_K])?, experts, world_size)
    };
    (0..world_size).map(of).collect()
}

/// A dispatch, with its exchange of counts, or a combine along routes.
pub(super) struct Routed<'a, T> {
    comm: &'a Communicator,
    case: Case,
    moe: Moe,
    layouts: Vec<Layout>,
    /// A dispatch's tokens.
    input: Vec<T>,
    /// What has arrived here.
    received: Vec<T>,
    /// What a combine gives.
    output: Vec<T>,
    routes: ByTokenRoutes,
}

impl<'a, T: Element> Routed<'a, T> {
    pub(super) fn new(comm: &'a Communicator, case: Case) -> Result<Self> {
        let [tokens, hidden] = shape(&case);
        let mut moe = Moe::new(comm, MoeConfig::default())?;
        let input = pattern::input::<T>(case.op, comm.rank(), tokens * hidden);
        let layouts = layouts(tokens, comm.world_size())?;
        let routes = moe.notify(comm, &routing(&layouts, comm.rank(), &case))?;
        let (received, output) =
            (vec![T::default(); routes.rows() * hidden], vec![T::default(); input.len()]);
        let mut routed = Self { comm, case, moe, layouts, input, received, output, routes };
        if case.collective == Collective::COMBINE {
            // It takes back what a dispatch brings.
            routed.dispatch(comm)?;
        }
        Ok(routed)
    }

    fn dispatch(&mut self, comm: &Communicator) -> Result<()> {
        let [tokens, hidden] = shape(&self.case);
        let received = TensorViewMut::new(&mut self.received, &[self.routes.rows(), hidden])?;
        let call = Dispatch {
            tokens: Tokens::of(TensorView::new(&self.input, &[tokens, hidden])?),
            received: Tokens::of(received),
        };
        Ok(self.moe.dispatch(comm, &self.routes, call)?)
    }
}

/// What a rank tells of a call's tokens.
fn routing<'a>(layouts: &'a [Layout], rank: usize, case: &Case) -> Routing<'a> {
    let [_, hidden] = shape(case);
    Routing::of(&layouts[rank], RowFormat { hidden, dtype: case.dtype, scales: None })
}

impl<T: Element> Contender<&Communicator> for Routed<'_, T> {
    fn name(&self) -> Result<String> {
        Ok("by_token".to_owned())
    }

    fn prepare(&mut self, _: &Communicator) -> Result<()> {
        let is_dispatch = self.case.collective == Collective::DISPATCH;
        super::poison(if is_dispatch { &mut self.received } else { &mut self.output });
        Ok(())
    }

    fn call(&mut self, comm: &Communicator) -> Result<()> {
        if self.case.collective == Collective::DISPATCH {
            self.routes = self.moe.notify(comm, &routing(&self.layouts, comm.rank(), &self.case))?;
            return self.dispatch(comm);
        }
        let [tokens, hidden] = shape(&self.case);
        let rows = TensorView::new(&self.received, &[self.routes.rows(), hidden])?;
        let output = TensorViewMut::new(&mut self.output, &[tokens, hidden])?;
        Ok(self.moe.combine(comm, &self.routes, Combine::of(rows, output))?)
    }

    fn check(&mut self, comm: &Communicator) -> Result<Wrong> {
        Ok(match self.case.collective {
            Collective::DISPATCH => wrong_rows(&self.case, &self.layouts, comm.rank(), &self.received),
            _ => wrong_sums(&self.layouts[comm.rank()], &self.input, &self.output),
        })
    }

    fn finish(self: Box<Self>) -> Result<()> {
        Ok(self.moe.close(self.comm)?)
    }
}

/// The wrong elements of the rows that a rank has received, which should be the tokens of all ranks that go to it, in order.
pub(crate) fn wrong_rows<T: Element>(case: &Case, layouts: &[Layout], rank: usize, received: &[T]) -> Wrong {
    let [tokens, hidden] = shape(case);
    let rows = layouts.iter().enumerate().flat_map(|(source, layout)| {
        let input = pattern::input::<T>(case.op, source, tokens * hidden);
        let goes = move |token: &usize| layout.is_token_in_rank[token * layouts.len() + rank] == 1;
        (0..tokens).filter(goes).flat_map(move |token| {
            input[token * hidden..][..hidden].iter().map(|element| element.to_f64()).collect::<Vec<_>>()
        })
    });
    Wrong::of(received, rows.map(exactly))
}

/// The wrong elements of sums of rows that came back as they went: each token as often as there are ranks that have it, which is exact.
pub(crate) fn wrong_sums<T: Element>(layout: &Layout, input: &[T], output: &[T]) -> Wrong {
    let world_size = layout.tokens_per_rank.len();
    let hidden = input.len() / (layout.is_token_in_rank.len() / world_size);
    let sums =
        input.chunks(hidden).zip(layout.is_token_in_rank.chunks(world_size)).flat_map(|(row, ranks)| {
            let times = ranks.iter().map(|&has| f64::from(has)).sum::<f64>();
            row.iter().map(move |element| element.to_f64() * times)
        });
    Wrong::of(output, sums.map(exactly))
}
