//! Whether there are enough GPUs for a test, and which one a rank has.
#![allow(dead_code)] // each test target uses its part

use antiphon_device::cuda::{CudaError, Device, Driver};

/// The GPUs' driver, if there are enough of them for a test. With `ANTIPHON_TEST_RANKS_PER_GPU=2` half as many are enough: two
/// ranks have a GPU then, which has room for the blocks of two.
pub fn gpus(world_size: usize) -> Option<&'static Driver> {
    antiphon_testing::gpus(world_size.div_ceil(ranks_per_gpu()))
}

/// How many ranks may share a GPU.
pub fn ranks_per_gpu() -> usize {
    std::env::var("ANTIPHON_TEST_RANKS_PER_GPU").map_or(1, |ranks| ranks.parse().expect("1 or 2"))
}

/// The device of a rank: the first ranks have one each.
pub fn device_of(driver: &'static Driver, rank: usize) -> Result<Device, CudaError> {
    driver.device(rank as u32 % driver.device_count()?)
}
