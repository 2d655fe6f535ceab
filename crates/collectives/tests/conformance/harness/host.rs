//! The collectives of ranks whose tensors lie in host memory.

use antiphon_collectives::{
    Call, Collectives, ReduceOp, Result,
    all_reduce::{self, Algorithm, AllReduceOptions},
    mixed::MixedHandler,
};
use antiphon_operation::Operation;
use antiphon_tensor::{TensorView, TensorViewMut};
use antiphon_testing::backend::{Host, Ranks};

use super::CollectiveBackend;

impl<R: Ranks> CollectiveBackend for Host<R> {
    type Mixed = MixedHandler;
    const SEAMS: &'static [usize] = &[128 << 10, 256 << 10, 512 << 10, 1 << 20, 3 << 20];

    fn call(
        &self,
        call: &Call<'_>,
        input: Option<TensorView<'_>>,
        output: Option<TensorViewMut<'_>>,
    ) -> Result<()> {
        Collectives::call(&**self, call, input, output)
    }

    fn call_in_place(&self, call: &Call<'_>, buffer: TensorViewMut<'_>) -> Result<()> {
        Collectives::call_in_place(&**self, call, buffer)
    }

    fn by_name(
        &self,
        call: &Call<'_>,
        input: Option<TensorView<'_>>,
        output: Option<TensorViewMut<'_>>,
    ) -> Result<()> {
        by_name!(&**self, call, input, output)
    }

    fn by_name_in_place(&self, call: &Call<'_>, buffer: TensorViewMut<'_>) -> Result<()> {
        by_name_in_place!(&**self, call, buffer)
    }

    fn all_reduce_with(
        &self,
        input: TensorView<'_>,
        output: TensorViewMut<'_>,
        op: ReduceOp,
        options: AllReduceOptions,
    ) -> Result<()> {
        Collectives::all_reduce_with(&**self, input, output, op, options)
    }

    fn algorithm_for(&self, bytes: usize) -> Algorithm {
        all_reduce::algorithm_for(self, bytes).unwrap()
    }

    fn send_recv(
        &self,
        input: TensorView<'_>,
        to: usize,
        output: TensorViewMut<'_>,
        from: usize,
    ) -> Result<()> {
        Ok((**self).send_recv(input, to, output, from)?)
    }
}
