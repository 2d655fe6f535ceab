//! The arrays of calls by token: of a layout, of tokens and of the rows that come.

use antiphon::{
    moe::{Choices, Tokens},
    tensor::TensorError,
};
use pyo3::{exceptions::PyValueError, prelude::*};

use crate::{array::Array, error::Result};

/// How many tokens go to each rank, how often each expert was chosen, which tokens go to which ranks.
pub(super) type LayoutArrays<'py> = (Bound<'py, PyAny>, Bound<'py, PyAny>, Bound<'py, PyAny>);
/// Rows, with their scales, ids and weights, which may be absent.
pub(super) type TokenArrays<'py> =
    (Bound<'py, PyAny>, Option<Bound<'py, PyAny>>, Option<Bound<'py, PyAny>>, Option<Bound<'py, PyAny>>);

type Import = fn(&Bound<'_, PyAny>, &'static str) -> Result<Array>;

/// The arrays of a layout, to be written.
pub(super) fn written_layout((ranks, experts, tokens): &LayoutArrays<'_>) -> Result<[Array; 3]> {
    Ok([
        Array::write(ranks, "tokens_per_rank")?,
        Array::write(experts, "tokens_per_expert")?,
        Array::write(tokens, "is_token_in_rank")?,
    ])
}

/// The arrays of tokens that are sent, or of rows that are received.
pub(super) struct Rows {
    pub(super) x: Array,
    pub(super) scales: Option<Array>,
    pub(super) ids: Option<Array>,
    pub(super) weights: Option<Array>,
}

impl Rows {
    pub(super) fn sent(arrays: &TokenArrays<'_>) -> Result<Self> {
        Self::import(arrays, ["x", "scales", "ids", "weights"], Array::read)
    }

    pub(super) fn received(arrays: &TokenArrays<'_>) -> Result<Self> {
        let names = ["received_x", "received_scales", "received_ids", "received_weights"];
        Self::import(arrays, names, Array::write)
    }

    fn import(arrays: &TokenArrays<'_>, names: [&'static str; 4], import: Import) -> Result<Self> {
        let (x, scales, ids, weights) = arrays;
        if ids.is_some() != weights.is_some() {
            return Err(PyValueError::new_err("dispatch: ids need weights, and weights need ids").into());
        }
        Ok(Self {
            x: import(x, names[0])?,
            scales: Array::given(scales.as_ref(), names[1], import)?,
            ids: Array::given(ids.as_ref(), names[2], import)?,
            weights: Array::given(weights.as_ref(), names[3], import)?,
        })
    }

    pub(super) fn all(&self) -> [Option<&Array>; 4] {
        [Some(&self.x), self.scales.as_ref(), self.ids.as_ref(), self.weights.as_ref()]
    }

    /// The tensors of the arrays.
    pub(super) fn tokens<T>(&self, view: impl Fn(&Array) -> Result<T, TensorError>) -> Result<Tokens<T>> {
        let given = |array: &Option<Array>| array.as_ref().map(&view).transpose();
        let choices = given(&self.ids)?.zip(given(&self.weights)?);
        Ok(Tokens {
            x: view(&self.x)?,
            scales: given(&self.scales)?,
            choices: choices.map(|(ids, weights)| Choices { ids, weights }),
        })
    }
}
