//! What the collectives of all backends have.

mod gpus;
mod host;
mod mixed;
mod nodes;
mod tensor;

use std::fmt::Display;

use antiphon_collectives::{
    Call, ReduceOp, Result,
    all_reduce::{Algorithm, AllReduceOptions},
};
use antiphon_tensor::{DType, TensorView, TensorViewMut};
use antiphon_testing::{Alignment, backend::Backend};

use crate::values::Values;

pub use gpus::Gpus;
pub use mixed::Mixed;
pub use nodes::{ByNodes, Halves, HostNodes, Interleaved, OneAndRest, Thirds};
pub use tensor::{Like, Loose, Tensor};

/// What is the same for all behaviours of one way to run ranks. Calls are over when they return.
pub trait CollectiveBackend: Backend {
    /// A handler of mixed collectives.
    type Mixed: Mixed<Self>;
    /// Sizes in bytes at which this backend may cut a tensor into pieces, ascending.
    const SEAMS: &'static [usize];

    /// What a reduction of these contributions gives, of ranks on these nodes.
    fn reduced(op: ReduceOp, contributions: &[Values], nodes: &[u32]) -> Values {
        Values::reduced(op, contributions, nodes)
    }

    /// The operators that behaviours try with a dtype. Each may be a program to compile.
    fn operators(_dtype: DType) -> &'static [ReduceOp] {
        &ReduceOp::ARITHMETIC
    }

    /// What a refusal to reduce such tensors says, where this backend cannot.
    fn refusal(_dtype: DType, _op: ReduceOp, _alignment: Alignment) -> Option<&'static str> {
        None
    }

    /// Before a call of all ranks whose tensors have been made.
    fn before(&self, _dtype: DType, _reduces: Option<ReduceOp>) {}
    /// Behind a call of all ranks, before its tensors go.
    fn behind(&self) {}

    fn call(
        &self,
        call: &Call<'_>,
        input: Option<TensorView<'_>>,
        output: Option<TensorViewMut<'_>>,
    ) -> Result<()>;

    fn call_in_place(&self, call: &Call<'_>, buffer: TensorViewMut<'_>) -> Result<()>;

    /// [`call`](Self::call) by the method that is named after the operation.
    fn by_name(
        &self,
        call: &Call<'_>,
        input: Option<TensorView<'_>>,
        output: Option<TensorViewMut<'_>>,
    ) -> Result<()>;

    /// [`call_in_place`](Self::call_in_place) by the method that is named after the operation.
    fn by_name_in_place(&self, call: &Call<'_>, buffer: TensorViewMut<'_>) -> Result<()>;

    fn all_reduce_with(
        &self,
        input: TensorView<'_>,
        output: TensorViewMut<'_>,
        op: ReduceOp,
        options: AllReduceOptions,
    ) -> Result<()>;

    /// The algorithm that is chosen for `bytes` bytes.
    fn algorithm_for(&self, bytes: usize) -> Algorithm;

    fn send_recv(
        &self,
        input: TensorView<'_>,
        to: usize,
        output: TensorViewMut<'_>,
        from: usize,
    ) -> Result<()>;

    /// The error that this rank gets from its peers, if a call that disagreed with theirs has succeeded here.
    fn told(&self) -> Result<()> {
        Ok(())
    }
}

/// The dtype in a test's name.
pub fn dtype(name: &str) -> DType {
    name.parse().unwrap()
}

/// The same bits: −0 is not 0, and one NaN is not another.
pub fn assert_same_bits<'a, 'e>(
    actual: impl Into<TensorView<'a>>,
    expected: impl Into<TensorView<'e>>,
    what: impl Display,
) {
    let (actual, expected) = (actual.into(), expected.into());
    assert_eq!((actual.dtype(), actual.numel()), (expected.dtype(), expected.numel()), "{what}");
    if actual.as_bytes() == expected.as_bytes() {
        return;
    }
    let size = actual.dtype().size();
    let (got, wanted) = (actual.as_bytes().unwrap(), expected.as_bytes().unwrap());
    let i = got.iter().zip(wanted).position(|(a, b)| a != b).expect("the bytes differ somewhere") / size;
    panic!(
        "{what}: element {i} is {:e} ({:02x?}), not {:e} ({:02x?})",
        actual.get_f64(&[i]).unwrap(),
        &got[i * size..][..size],
        expected.get_f64(&[i]).unwrap(),
        &wanted[i * size..][..size],
    );
}
