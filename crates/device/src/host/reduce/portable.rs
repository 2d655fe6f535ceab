//! Any dtype, any operator, any number of sources: plain loops that the compiler vectorises.

use std::mem::MaybeUninit;

use antiphon_tensor::Element;

use super::arithmetic::{Combine, Domain, read};

/// Accumulators of one pass: at most 4 KiB, which stays in L1 while the sources stream by.
const TILE: usize = 512;

type Tile<A> = [MaybeUninit<A>; TILE];

/// Widens the elements of the first source from `begin` on, and combines those of the others with them.
///
/// # Safety
/// The sources, of which there is one, are valid for reads of the tile's elements.
#[inline(always)]
unsafe fn accumulate<T: Element, D: Domain<T>, C: Combine<D::Accumulator>>(
    tile: &mut [MaybeUninit<D::Accumulator>],
    mut sources: impl Iterator<Item = *const u8>,
    begin: usize,
) -> &mut [D::Accumulator] {
    let first = sources.next().expect("a reduction has a source");
    // SAFETY: the caller vouches for the elements; the first loop has written every slot of the tile.
    unsafe {
        for (i, slot) in tile.iter_mut().enumerate() {
            slot.write(D::widen(read(first, begin + i)));
        }
        let tile = &mut *(std::ptr::from_mut(tile) as *mut [D::Accumulator]);
        for source in sources {
            for (i, slot) in tile.iter_mut().enumerate() {
                *slot = C::combine(*slot, D::widen(read(source, begin + i)));
            }
        }
        tile
    }
}

/// Rounds the accumulators, divided by `divisor` if there is one, into elements from `begin` on.
///
/// # Safety
/// The destination is valid for writes of the tile's elements.
#[inline(always)]
unsafe fn conclude<T: Element, D: Domain<T>>(
    tile: &mut [D::Accumulator],
    divisor: Option<usize>,
    destination: *mut u8,
    begin: usize,
) {
    if let Some(divisor) = divisor {
        for slot in tile.iter_mut() {
            *slot = D::divide(*slot, divisor);
        }
    }
    for (i, slot) in tile.iter().enumerate() {
        // SAFETY: the caller vouches for the elements.
        unsafe { destination.cast::<T>().add(begin + i).write_unaligned(D::narrow(*slot)) };
    }
}

#[inline(always)]
unsafe fn reduce<T: Element, D: Domain<T>, C: Combine<D::Accumulator>>(
    destination: *mut u8,
    sources: &[*const u8],
    start: usize,
    count: usize,
    mean: bool,
) {
    let mut tile: Tile<D::Accumulator> = [const { MaybeUninit::uninit() }; TILE];
    for begin in (start..count).step_by(TILE) {
        let tile = &mut tile[..TILE.min(count - begin)];
        // SAFETY: the tile ends before `count`, and the caller vouches for `count` elements. All reads of a tile come before
        // its writes, so the destination may be a source.
        unsafe {
            let tile = accumulate::<T, D, C>(tile, sources.iter().copied(), begin);
            conclude::<T, D>(tile, mean.then_some(sources.len()), destination, begin);
        }
    }
}

#[inline(always)]
unsafe fn reduce_by_node<T: Element, D: Domain<T>, C: Combine<D::Accumulator>>(
    destination: *mut u8,
    sources: &[*const u8],
    nodes: &[u32],
    count: usize,
    mean: bool,
) {
    let mut tile: Tile<D::Accumulator> = [const { MaybeUninit::uninit() }; TILE];
    let mut of_node: Tile<D::Accumulator> = [const { MaybeUninit::uninit() }; TILE];
    let of = |node: u32| sources.iter().zip(nodes).filter(move |at| *at.1 == node).map(|at| *at.0);
    let is_first = |&at: &usize| !nodes[..at].contains(&nodes[at]);
    for begin in (0..count).step_by(TILE) {
        let len = TILE.min(count - begin);
        // SAFETY: as in `reduce`.
        unsafe {
            let sum = accumulate::<T, D, C>(&mut tile[..len], of(nodes[0]), begin);
            for node in (1..nodes.len()).filter(is_first).map(|at| nodes[at]) {
                let of_node = accumulate::<T, D, C>(&mut of_node[..len], of(node), begin);
                for (slot, &node) in sum.iter_mut().zip(of_node.iter()) {
                    *slot = C::combine(*slot, node);
                }
            }
            conclude::<T, D>(sum, mean.then_some(sources.len()), destination, begin);
        }
    }
}

/// Accumulates the sources, without rounding.
#[inline(always)]
unsafe fn accumulate_all<T: Element, D: Domain<T>, C: Combine<D::Accumulator>>(
    sums: *mut u8,
    sources: &[*const u8],
    count: usize,
) {
    let mut tile: Tile<D::Accumulator> = [const { MaybeUninit::uninit() }; TILE];
    for begin in (0..count).step_by(TILE) {
        let tile = &mut tile[..TILE.min(count - begin)];
        // SAFETY: as in `reduce`.
        unsafe {
            let tile = accumulate::<T, D, C>(tile, sources.iter().copied(), begin);
            let sums = sums.cast::<D::Accumulator>().add(begin);
            for (i, slot) in tile.iter().enumerate() {
                sums.add(i).write_unaligned(*slot);
            }
        }
    }
}

/// Combines what was accumulated, and rounds.
#[inline(always)]
unsafe fn conclude_all<T: Element, D: Domain<T>, C: Combine<D::Accumulator>>(
    destination: *mut u8,
    sums: &[*const u8],
    count: usize,
    divisor: Option<usize>,
) {
    let (first, rest) = sums.split_first().expect("a reduction has a source");
    let mut tile: [D::Accumulator; TILE] = [D::Accumulator::default(); TILE];
    for begin in (0..count).step_by(TILE) {
        let tile = &mut tile[..TILE.min(count - begin)];
        // SAFETY: as in `reduce`; the sums are accumulators.
        unsafe {
            let sum = |of: *const u8, i: usize| of.cast::<D::Accumulator>().add(begin + i).read_unaligned();
            for (i, slot) in tile.iter_mut().enumerate() {
                *slot = sum(*first, i);
            }
            for of in rest {
                for (i, slot) in tile.iter_mut().enumerate() {
                    *slot = C::combine(*slot, sum(*of, i));
                }
            }
            conclude::<T, D>(tile, divisor, destination, begin);
        }
    }
}

macro_rules! compiled_for {
    ($(#[$attribute:meta])* $name:ident, $by_node:ident, $accumulate:ident, $conclude:ident) => {
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

        /// # Safety
        /// As [`NodeKernel`](super::NodeKernel) says, on a machine with the instructions of the function's name.
        $(#[$attribute])*
        pub(super) unsafe fn $by_node<T: Element, D: Domain<T>, C: Combine<D::Accumulator>>(
            destination: *mut u8,
            sources: &[*const u8],
            nodes: &[u32],
            count: usize,
            mean: bool,
        ) {
            // SAFETY: passed on to the caller.
            unsafe { reduce_by_node::<T, D, C>(destination, sources, nodes, count, mean) }
        }

        /// # Safety
        /// As [`Accumulate`](super::Accumulate) says, on a machine with the instructions of the function's name.
        $(#[$attribute])*
        pub(super) unsafe fn $accumulate<T: Element, D: Domain<T>, C: Combine<D::Accumulator>>(
            sums: *mut u8,
            sources: &[*const u8],
            count: usize,
        ) {
            // SAFETY: passed on to the caller.
            unsafe { accumulate_all::<T, D, C>(sums, sources, count) }
        }

        /// # Safety
        /// As [`Conclude`](super::Conclude) says, on a machine with the instructions of the function's name.
        $(#[$attribute])*
        pub(super) unsafe fn $conclude<T: Element, D: Domain<T>, C: Combine<D::Accumulator>>(
            destination: *mut u8,
            sums: &[*const u8],
            count: usize,
            divisor: Option<usize>,
        ) {
            // SAFETY: passed on to the caller.
            unsafe { conclude_all::<T, D, C>(destination, sums, count, divisor) }
        }
    };
}

compiled_for!(baseline, baseline_by_node, baseline_accumulate, baseline_conclude);
compiled_for!(
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,f16c")]
    avx2,
    avx2_by_node,
    avx2_accumulate,
    avx2_conclude
);
compiled_for!(
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
    avx512,
    avx512_by_node,
    avx512_accumulate,
    avx512_conclude
);
