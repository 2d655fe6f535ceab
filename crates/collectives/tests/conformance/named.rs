//! The methods that are named after operations: each is the call of its operation.

use antiphon_collectives::Call;
use antiphon_operation::{InPlace, Operation};
use antiphon_tensor::DType;

use crate::{
    harness::{CollectiveBackend, Like, Loose},
    operations::{Rank, calls_of, operations},
};

conformance! {
    named_methods_give_what_their_calls_give: [f32 i64], [world_1 world_2 world_3 world_4];
    named_methods_refuse_what_their_calls_refuse: any_dtype, [world_1 world_2 world_3];
}

fn named_methods_give_what_their_calls_give<B: CollectiveBackend>(dtype: DType, world: usize) {
    B::run(world, |comm| {
        for rank in [Rank::<B>::new(&comm, dtype), Rank::new(&comm, dtype).by_name()] {
            for operation in operations() {
                for (i, count) in [1, 1000].into_iter().enumerate() {
                    let (calls, ops) = (calls_of(operation, count, world), B::operators(dtype));
                    let op = ops[i % ops.len()];
                    rank.calls(|me| calls[me].clone().with_root((i + 1) % world).with_op(op), count);
                }
            }
        }
    });
}

/// Each rank is its own root, so that all look at both tensors.
fn named_methods_refuse_what_their_calls_refuse<B: CollectiveBackend>(world: usize) {
    B::run(world, |comm| {
        let floats = Like::of(DType::F32, world);
        let wrong = [Like::of(DType::I32, world), Like::of(DType::F32, world * world + 1)];
        for operation in operations() {
            let calls = calls_of(operation, 1, world);
            let call = calls[comm.rank()].clone().with_root(comm.rank());
            for wrong in wrong {
                let texts = [B::call, B::by_name].map(|method| {
                    let [mut input, mut output] = [floats, wrong].map(|like| Loose::new(&comm, like));
                    method(&comm, &call, Some(input.view()), Some(output.view_mut())).unwrap_err().to_string()
                });
                assert_eq!(texts[0], texts[1], "{operation} to {wrong:?}");
            }
            if has_method_in_place(operation) {
                let call = Call::new(operation).with_root(world);
                let texts = [B::call_in_place, B::by_name_in_place].map(|method| {
                    let mut buffer =
                        Loose::new(&comm, Like { dtype: DType::F32, count: 2 * world, stride: 3 });
                    method(&comm, &call, buffer.view_mut()).unwrap_err().to_string()
                });
                assert_eq!(texts[0], texts[1], "{operation} in place");
            }
        }
    });
}

/// Parts of uneven lengths go in place only by a call as a value.
pub fn has_method_in_place(operation: Operation) -> bool {
    operation.row().in_place != InPlace::Never
        && !matches!(operation, Operation::AllGatherV | Operation::ReduceScatterV)
}
