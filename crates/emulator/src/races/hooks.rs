//! What programs call: the functions of `checks` in device/types.hpp.

use super::{
    access::{END, READ, SEQUENTIAL, WRITE},
    is_checking,
    shadow::{self, Shard},
    threads,
};
use crate::schedule;

/// As in device/types.hpp.
#[repr(C)]
pub(crate) struct Checks {
    end_thread: unsafe extern "C" fn(),
    end_shared: unsafe extern "C" fn(usize, usize),
    weak: unsafe extern "C" fn(usize, usize, u32),
    enter: unsafe extern "C" fn(usize, usize, u32, u32, u32) -> *const Shard,
    older: unsafe extern "C" fn(usize, *mut u8, u32) -> bool,
    is_lost: unsafe extern "C" fn() -> bool,
    leave: unsafe extern "C" fn(*const Shard),
    fence: unsafe extern "C" fn(u32),
    proxy_fence: unsafe extern "C" fn(u32),
    block_barrier: unsafe extern "C" fn(),
    warp_barrier: unsafe extern "C" fn(u32, u32),
    cluster_arrive: unsafe extern "C" fn(bool),
    cluster_wait: unsafe extern "C" fn(),
    copy: unsafe extern "C" fn(usize, usize, usize, usize, bool) -> u32,
    copied: unsafe extern "C" fn(usize, usize, usize, u32),
    copies_done: unsafe extern "C" fn(u32, bool),
    barrier_arrive: unsafe extern "C" fn(usize),
    barrier_complete: unsafe extern "C" fn(usize, u32, u32),
    barrier_wait: unsafe extern "C" fn(usize),
    grid_wait: unsafe extern "C" fn(),
}

pub(crate) static CHECKS: Checks = Checks {
    end_thread,
    end_shared,
    weak,
    enter,
    older,
    is_lost,
    leave,
    fence,
    proxy_fence,
    block_barrier,
    warp_barrier,
    cluster_arrive,
    cluster_wait,
    copy,
    copied,
    copies_done,
    barrier_arrive,
    barrier_complete,
    barrier_wait,
    grid_wait,
};

unsafe extern "C" fn end_thread() {
    threads::with(|block| block.end_thread());
}

unsafe extern "C" fn end_shared(at: usize, bytes: usize) {
    if is_checking() {
        threads::with(|block| block.access(at, bytes, END, WRITE));
    }
}

unsafe extern "C" fn weak(at: usize, pc: usize, what: u32) {
    // Most accesses are of a fiber's stack.
    if shadow::page(at).is_some() && what & (READ | WRITE) != 0 && is_checking() {
        threads::with(|block| block.access(at, (what & 0xFF) as usize, pc as u64 - 1, what));
        schedule::accessed();
    }
}

unsafe extern "C" fn enter(at: usize, pc: usize, what: u32, bytes: u32, unit: u32) -> *const Shard {
    let is_there = shadow::page(at).is_some() && is_checking();
    let sizes = [bytes as usize, unit as usize];
    let locked = is_there.then(|| threads::with(|block| block.locked(at, sizes, pc as u64, what)));
    locked.flatten().flatten().map_or(std::ptr::null(), shadow::Locked::keep)
}

unsafe extern "C" fn older(at: usize, value: *mut u8, bytes: u32) -> bool {
    // SAFETY: the value that was loaded there.
    let value = unsafe { std::slice::from_raw_parts_mut(value, bytes as usize) };
    threads::with(|block| block.replace(at, value)).unwrap_or(false)
}

unsafe extern "C" fn is_lost() -> bool {
    threads::with(|block| block.is_lost).unwrap_or(false)
}

unsafe extern "C" fn leave(entered: *const Shard) {
    // SAFETY: of `enter`, once.
    unsafe { shadow::unlock(entered) };
}

unsafe extern "C" fn fence(scope: u32) {
    threads::with(|block| {
        let is_sequential = scope & SEQUENTIAL != 0;
        let scope = (scope >> 16 & 3) as usize;
        if is_sequential { block.sequential_fence(scope) } else { block.fence(scope) }
    });
}

unsafe extern "C" fn proxy_fence(spaces: u32) {
    threads::with(|block| block.proxy_fence(spaces));
}

unsafe extern "C" fn block_barrier() {
    threads::with(|block| block.barrier());
}

unsafe extern "C" fn warp_barrier(warp: u32, lanes: u32) {
    threads::with(|block| block.warp_barrier(warp, lanes));
}

unsafe extern "C" fn cluster_arrive(orders: bool) {
    threads::with(|block| block.cluster_arrive(orders));
}

unsafe extern "C" fn cluster_wait() {
    threads::with(|block| block.cluster_wait());
}

unsafe extern "C" fn copy(to: usize, from: usize, bytes: usize, pc: usize, is_bulk: bool) -> u32 {
    let copy = |block: &mut threads::Block| block.copy([to, from], bytes, pc as u64, is_bulk);
    if is_checking() { threads::with(copy).unwrap_or(0) } else { 0 }
}

unsafe extern "C" fn copied(from: usize, bytes: usize, pc: usize, number: u32) {
    if is_checking() {
        threads::with(|block| block.copied(from, bytes, pc as u64, number));
    }
}

unsafe extern "C" fn copies_done(number: u32, only_read: bool) {
    threads::with(|block| block.copies_done(number, only_read));
}

unsafe extern "C" fn barrier_arrive(barrier: usize) {
    threads::with(|block| block.barrier_arrive(barrier));
}

unsafe extern "C" fn barrier_complete(barrier: usize, thread: u32, number: u32) {
    threads::with(|block| block.barrier_complete(barrier, thread, number));
}

unsafe extern "C" fn barrier_wait(barrier: usize) {
    threads::with(|block| block.barrier_wait(barrier));
}

unsafe extern "C" fn grid_wait() {
    threads::with(|block| block.grid_wait());
}
