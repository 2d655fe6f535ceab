//! What others than the root pass, in the operations that have one.

use antiphon_collectives::{Collectives, ReduceOp};
use antiphon_tensor::{TensorView, TensorViewMut};

use crate::harness::Backend;

conformance! {
    what_others_than_the_root_pass_does_not_matter: any_dtype, [world_2 world_3];
}

/// Where only the root's tensor counts, the others may pass one of another dtype, of another length, strided.
fn what_others_than_the_root_pass_does_not_matter<B: Backend>(world: usize) {
    B::run(world, |comm| {
        let (root, mine) = (world - 1, [comm.rank() as i32; 4]);
        let (bytes, mut more_bytes) = ([7u8; 9], [7u8; 9]);
        let strange = TensorView::with_strides(&bytes, &[3], &[3]).unwrap();
        let is_root = comm.rank() == root;

        let mut got = [0i32; 4];
        let input = if is_root { (&mine).into() } else { strange };
        comm.broadcast_from(Some(input), &mut got, root).unwrap();
        assert_eq!(got, [root as i32; 4]);

        let row: Vec<i32> = (0..4 * world as i32).collect();
        let input = if is_root { (&row).into() } else { strange };
        comm.scatter(Some(input), &mut got, root).unwrap();
        assert_eq!(got, row[4 * comm.rank()..][..4]);

        let mut sum = [0i32; 4];
        let output = if is_root { (&mut sum).into() } else { every_third(&mut more_bytes) };
        comm.reduce(&mine, Some(output), ReduceOp::Max, root).unwrap();
        assert_eq!(sum, if is_root { mine } else { [0; 4] });

        let mut all = vec![0i32; 4 * world];
        let output = if is_root { (&mut all).into() } else { every_third(&mut more_bytes) };
        comm.gather(&mine, Some(output), root).unwrap();
        assert_eq!(all[4 * root..], if is_root { mine } else { [0; 4] });
        assert_eq!(more_bytes, [7; 9]);
    });
}

fn every_third(bytes: &mut [u8; 9]) -> TensorViewMut<'_> {
    TensorViewMut::with_strides(bytes, &[3], &[3]).unwrap()
}
