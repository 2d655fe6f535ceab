//! Any dtype, any operator, any number of sources: plain loops that the compiler vectorises.

use std::mem::MaybeUninit;

use antiphon_tensor::Element;

use super::arithmetic::{Combine, Domain, read};

/// Accumulators of one pass: at most 4 KiB, which stays in L1 while the sources stream by.
const TILE: usize = 512;

#[inline(always)]
unsafe fn reduce<T: Element, D: Domain<T>, C: Combine<D::Accumulator>>(
    destination: *mut u8,
    sources: &[*const u8],
    start: usize,
    count: usize,
    mean: bool,
) {
    let mut tile = [const { MaybeUninit::<D::Accumulator>::uninit() }; TILE];
    let (first, rest) = sources.split_first().expect("a reduction has a source");
    for begin in (start..count).step_by(TILE) {
        let tile = &mut tile[..TILE.min(count - begin)];
        // SAFETY: `begin + i < count` in every loop, and the caller vouches for `count` elements. All reads of a tile
        // come before its writes, so the destination may be a source.
        unsafe {
            for (i, slot) in tile.iter_mut().enumerate() {
                slot.write(D::widen(read(*first, begin + i)));
            }
            // The loop above has written every slot of the tile.
            let tile = &mut *(std::ptr::from_mut(tile) as *mut [D::Accumulator]);
            for source in rest {
                for (i, slot) in tile.iter_mut().enumerate() {
                    *slot = C::combine(*slot, D::widen(read(*source, begin + i)));
                }
            }
            if mean {
                for slot in tile.iter_mut() {
                    *slot = D::divide(*slot, sources.len());
                }
            }
            for (i, slot) in tile.iter().enumerate() {
                destination.cast::<T>().add(begin + i).write_unaligned(D::narrow(*slot));
            }
        }
    }
}

macro_rules! compiled_for {
    ($(#[$attribute:meta])* $name:ident) => {
        /// # Safety
        /// As [`Kernel`](super::Kernel) says, on a machine with the instructions of the function's name.
        $(#[$attribute])*
        pub(super) unsafe fn $name<T: Element, D: Domain<T>, C: Combine<D::Accumulator>>(
            destination: *mut u8,
            sources: &[*const u8],
            start: usize,
            count: usize,
            mean: bool,
        ) {
            // SAFETY: passed on to the caller.
            unsafe { reduce::<T, D, C>(destination, sources, start, count, mean) }
        }
    };
}

compiled_for!(baseline);
compiled_for!(
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,f16c")]
    avx2
);
compiled_for!(
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
    avx512
);
