//! Dispatch and combine of a mixture of experts. The size is that of a rank's tokens, in rows of up to 14336 bytes.

use antiphon::{
    collectives::Communicator,
    moe::{Combine, Dispatch, Handle, Layout, Moe, MoeConfig, MoeError, Routing, RowFormat, Tokens, layout},
    tensor::{Element, TensorView, TensorViewMut},
};

use super::{
    Args,
    case::{Case, Collective},
    pattern::{self, Wrong},
    worker::{poisoned, row, time, total},
};
use crate::report::Row;

/// Bytes of a row, at most: 7168 elements of 16 bits.
const ROW_BYTES: usize = 14_336;
/// The bytes of a vector. A row is a whole number of vectors.
const VECTOR: usize = 16;
pub(super) const LOCAL_EXPERTS: usize = 8;
pub(super) const TOP_K: usize = 2;

/// Tokens of a rank, and elements of each.
pub(super) fn shape(case: &Case) -> [usize; 2] {
    let bytes = (case.bytes as usize / VECTOR * VECTOR).clamp(VECTOR, ROW_BYTES);
    [(case.bytes as usize / bytes).max(1), bytes / case.dtype.size()]
}

/// Elements of a rank's tokens, and of what it gets at most: every token of every rank.
pub(super) fn counts(case: &Case, world_size: usize) -> (usize, usize) {
    let [tokens, hidden] = shape(case);
    match case.collective {
        Collective::DISPATCH => (tokens * hidden, tokens * hidden * world_size),
        _ => (tokens * hidden * world_size, tokens * hidden),
    }
}

/// The experts that a rank's tokens choose.
pub(super) fn choices(rank: usize, tokens: usize, experts: usize) -> Vec<i64> {
    let expert = |token: usize, k: usize| (token * 2_654_435_761 + rank * 40_503 + k * 7919) >> 5;
    (0..tokens).flat_map(|token| (0..TOP_K).map(move |k| (expert(token, k) % experts) as i64)).collect()
}

/// The layout of a rank's choices, which every rank can compute.
pub(super) fn layout_of(rank: usize, tokens: usize, world_size: usize) -> Result<Layout, MoeError> {
    let experts = LOCAL_EXPERTS * world_size;
    let ids = choices(rank, tokens, experts);
    layout(&TensorView::new(&ids, &[tokens, TOP_K])?, experts, world_size)
}

pub(super) fn measure<T: Element>(comm: &Communicator, case: Case, args: &Args) -> Result<Row, MoeError> {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let [tokens, hidden] = shape(&case);
    let mut moe = Moe::new(comm, MoeConfig::default())?;
    let input = pattern::input::<T>(case.op, rank, tokens * hidden);
    let layouts: Vec<Layout> =
        (0..world_size).map(|rank| layout_of(rank, tokens, world_size)).collect::<Result<_, _>>()?;
    let format = RowFormat { hidden, dtype: case.dtype, scales: None };
    let routing = Routing::of(&layouts[rank], format);
    let handle = moe.notify(comm, &routing)?;
    let mut received = poisoned::<T>(handle.rows() * hidden);
    let dispatch = |moe: &mut Moe, handle: &Handle, received: &mut Vec<T>| {
        let call = Dispatch {
            tokens: Tokens::of(TensorView::new(&input, &[tokens, hidden])?),
            received: Tokens::of(TensorViewMut::new(received, &[handle.rows(), hidden])?),
        };
        moe.dispatch(comm, handle, call)
    };
    dispatch(&mut moe, &handle, &mut received)?;
    let (times, wrong) = match case.collective {
        Collective::DISPATCH => {
            let first = wrong_rows(&case, &layouts, rank, &received);
            let times = time(comm, args, || {
                let handle = moe.notify(comm, &routing)?;
                dispatch(&mut moe, &handle, &mut received)
            })?;
            (times, [first, wrong_rows(&case, &layouts, rank, &received)])
        }
        _ => {
            let mut output = poisoned::<T>(tokens * hidden);
            let combine = |moe: &mut Moe, output: &mut Vec<T>| {
                let rows = TensorView::new(&received, &[handle.rows(), hidden])?;
                moe.combine(comm, &handle, Combine::of(rows, TensorViewMut::new(output, &[tokens, hidden])?))
            };
            combine(&mut moe, &mut output)?;
            let first = wrong_sums(&layouts[rank], &input, &output);
            let times = time(comm, args, || combine(&mut moe, &mut output))?;
            (times, [first, wrong_sums(&layouts[rank], &input, &output)])
        }
    };
    let wrong = total(comm, &wrong)?;
    moe.close(comm)?;
    Ok(row(comm, case, "normal".to_owned(), input.len(), &times, wrong))
}

/// Compares elements with what they must be, exactly.
fn wrong<T: Element>(actual: &[T], expected: impl Iterator<Item = f64>) -> Wrong {
    let mut wrong = Wrong::default();
    let mut expected = expected.fuse();
    for element in actual {
        let off = expected.next().map_or(f64::INFINITY, |expected| (element.to_f64() - expected).abs());
        if off != 0.0 {
            wrong.elements += 1;
            wrong.worst = wrong.worst.max(off);
        }
    }
    wrong
}

/// The wrong elements of the rows that a rank has received, which should be the tokens of all ranks that go to it, in order.
pub(super) fn wrong_rows<T: Element>(case: &Case, layouts: &[Layout], rank: usize, received: &[T]) -> Wrong {
    let [tokens, hidden] = shape(case);
    let rows = layouts.iter().enumerate().flat_map(|(source, layout)| {
        let input = pattern::input::<T>(case.op, source, tokens * hidden);
        let goes = move |token: &usize| layout.is_token_in_rank[token * layouts.len() + rank] == 1;
        (0..tokens).filter(goes).flat_map(move |token| {
            input[token * hidden..][..hidden].iter().map(|element| element.to_f64()).collect::<Vec<_>>()
        })
    });
    wrong(received, rows)
}

/// The wrong elements of sums of rows that came back as they went: each token as often as there are ranks that have it, which is exact.
pub(super) fn wrong_sums<T: Element>(layout: &Layout, input: &[T], output: &[T]) -> Wrong {
    let world_size = layout.tokens_per_rank.len();
    let hidden = input.len() / (layout.is_token_in_rank.len() / world_size);
    let sums =
        input.chunks(hidden).zip(layout.is_token_in_rank.chunks(world_size)).flat_map(|(row, ranks)| {
            let times = ranks.iter().map(|&has| f64::from(has)).sum::<f64>();
            row.iter().map(move |element| element.to_f64() * times)
        });
    wrong(output, sums)
}
