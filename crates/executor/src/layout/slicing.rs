//! The division of a call into launches.
//!
//! A plan that is right for chunks is right for equal parts of them, so a launch may do one slice of every chunk.

use antiphon_plan::Extent;

use crate::{ExecutorError, error::Result};

/// How a call is divided into launches: each handles one slice of every chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Slicing {
    /// Bytes of a chunk.
    pub(crate) chunk: usize,
    /// Bytes of a slice of it.
    pub(crate) slice: usize,
}

impl Slicing {
    pub(crate) fn launches(&self) -> usize {
        self.chunk.div_ceil(self.slice.max(1)).max(1)
    }

    /// Bytes of a slice; the last one may be shorter.
    pub(crate) fn len(&self, launch: usize) -> usize {
        self.slice.min(self.chunk - launch * self.slice)
    }

    /// Whether chunks are cut.
    pub(crate) fn cuts(&self) -> bool {
        self.slice < self.chunk
    }
}

/// The number of bytes of which each slice but the last is a multiple: whole elements, and, if it is `whole_lines`, whole cache lines. If
/// that number exceeds 64 bits, it is the largest one.
pub(crate) fn unit(extent: &Extent, element: usize, whole_lines: bool) -> u64 {
    let of = if whole_lines { 64 } else { element as u64 };
    least_common_multiple(extent.alignment(), of).unwrap_or(u64::MAX)
}

/// Most bytes of a chunk that a launch may handle: whole elements, of what is proved.
///
/// # Errors
/// [`ExecutorError::Unproved`]
pub(crate) fn most_proved(
    plan: &str,
    largest_chunk: Option<u64>,
    extent: &Extent,
    element: usize,
) -> Result<usize> {
    // Chunks are parts of tensors, and so fit into memory.
    let chunk = extent.chunk() as usize;
    let Some(largest) = largest_chunk.filter(|&largest| largest < extent.chunk()) else {
        return Ok(chunk);
    };
    match [true, false].map(|lines| unit(extent, element, lines)).into_iter().find(|&unit| unit <= largest) {
        Some(unit) => Ok((largest / unit * unit) as usize),
        None => Err(ExecutorError::Unproved {
            plan: plan.to_owned(),
            largest_chunk: largest,
            chunk: extent.chunk(),
            multiple: unit(extent, element, false),
        }),
    }
}

fn least_common_multiple(a: u64, b: u64) -> Option<u64> {
    let (mut x, mut y) = (a, b);
    while y > 0 {
        (x, y) = (y, x % y);
    }
    (a / x).checked_mul(b)
}
