//! Operations in which every rank has a block of one size for every rank: kernels between GPUs, and rounds on the host, which serve parts
//! of uneven lengths too.

pub(crate) mod cuda;
pub(super) mod host;
