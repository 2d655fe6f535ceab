//! Which messages a plan serves.

use antiphon_plan::Extent;
use antiphon_tensor::{DType, TensorError};

use super::{memory::Areas, plan::CudaPlan};
use crate::{
    ExecutorError,
    error::Result,
    layout::{Slicing, most_proved, unit},
};

/// Most launches of a call: a message that needs more is better given more scratch.
const MOST_LAUNCHES: usize = 1024;

/// Which of an input and an output is the message of a collective: the output of an all-gather, else the input.
pub(super) fn message<T>(collective: &str, [input, output]: [T; 2]) -> T {
    if collective == "allgather" { output } else { input }
}

/// Refuses dtypes that the kernel does not have.
pub(super) fn check_dtype(dtype: DType) -> Result<()> {
    match DType::NUMERIC.contains(&dtype) {
        true => Ok(()),
        false => Err(ExecutorError::Tensor { which: "tensor", source: TensorError::NotNumeric { dtype } }),
    }
}

impl CudaPlan {
    /// The bytes of a message with an input and an output of these bytes, as [`prepare`](Self::prepare) takes them.
    pub fn message_bytes(&self, input_bytes: usize, output_bytes: usize) -> usize {
        message(&self.plan.collective, [input_bytes, output_bytes])
    }

    /// Whether the plan can be [prepared](Self::prepare) for messages of `bytes` bytes of a dtype, if there is memory.
    ///
    /// # Errors
    /// What [`prepare`](Self::prepare) would refuse: [`ExecutorError::Plan`], [`Tensor`](ExecutorError::Tensor) and
    /// [`Buffers`](ExecutorError::Buffers), and [`Unproved`](ExecutorError::Unproved).
    pub fn serves(&self, dtype: DType, bytes: usize) -> Result<()> {
        let extent = self.extent(dtype, bytes)?;
        self.slicing(dtype, &extent).map(drop)
    }

    /// The bytes of the input and of the output of a message of `bytes` bytes.
    ///
    /// # Errors
    /// [`ExecutorError::Plan`] and [`Tensor`](ExecutorError::Tensor) for a message that the plan does not serve.
    pub(super) fn tensor_bytes(&self, dtype: DType, bytes: usize) -> Result<[usize; 2]> {
        let chunk = self.extent(dtype, bytes)?.chunk() as usize;
        Ok(self.chunks().map(|chunks| chunks as usize * chunk))
    }

    /// The least number of bytes from `bytes` on that is a whole number of chunks of a dtype.
    pub(super) fn whole_message(&self, dtype: DType, bytes: usize) -> usize {
        let chunks = message(&self.plan.collective, self.chunks()).max(1) as usize;
        let alignment = (self.plan.buffer_alignment as usize).next_multiple_of(dtype.size().max(1));
        bytes.next_multiple_of(chunks * alignment.max(1))
    }

    /// The extent of a message.
    pub(super) fn extent(&self, dtype: DType, bytes: usize) -> Result<Extent> {
        check_dtype(dtype)?;
        let chunks = self.chunks();
        let message = message(&self.plan.collective, chunks);
        let part = |count: u64| match message {
            0 => bytes as u64,
            _ => (u128::from(count) * bytes as u128 / u128::from(message)) as u64,
        };
        Ok(Extent::new(&self.plan, part(chunks[0]), part(chunks[1]))?)
    }

    /// The slices of a message of which one launch does one: the largest within the proof and the scratch.
    pub(super) fn slicing(&self, dtype: DType, extent: &Extent) -> Result<Slicing> {
        let chunk = extent.chunk() as usize;
        let proved = most_proved(&self.name, self.largest_chunk, extent, dtype.size())?;
        let fits = |slice: &usize| self.areas(Slicing { chunk, slice: *slice }, false).is_ok();
        // Plain data and packets of a chunk take up to three times its bytes, and what packets and areas are padded by.
        let scratch = self.checked.scratch_chunks.max(1) as usize;
        let bound = (self.options.most_scratch / self.halves()).saturating_sub(512) / scratch;
        let bound = if self.checked.uses_packets { bound.saturating_sub(14) / 3 } else { bound };
        let whole = |unit: u64| usize::try_from(unit).ok().map(|unit| bound.min(proved) / unit * unit);
        let smaller = [true, false].into_iter().filter_map(|lines| whole(unit(extent, dtype.size(), lines)));
        let slice =
            [proved].into_iter().chain(smaller.filter(|&slice| slice > 0)).find(fits).unwrap_or(proved);
        let slicing = Slicing { chunk, slice };
        self.areas(slicing, false)?;
        match slicing.launches() {
            launches if launches <= MOST_LAUNCHES => Ok(slicing),
            launches => Err(ExecutorError::Buffers {
                plan: self.name.clone(),
                what: format!(
                    "chunks of {chunk} bytes take {launches} launches of {slice} bytes each, and a call has at most {MOST_LAUNCHES}"
                ),
            }),
        }
    }

    /// How many halves of the scratch launches take in turn. Where ranks meet before each launch, one is enough.
    fn halves(&self) -> usize {
        if self.plan.use_double_scratch_buffer && !self.meets { 2 } else { 1 }
    }

    /// The memory of calls with these slices, in place or not.
    pub(super) fn areas(&self, slicing: Slicing, in_place: bool) -> Result<Areas> {
        let ([input, output], scratch) = (self.chunks(), self.checked.scratch_chunks);
        let stages = self.mode(in_place).may_stage;
        let (halves, packets) = (self.halves(), self.checked.uses_packets);
        let areas = Areas::new(slicing, [input, output, scratch], halves, stages, packets);
        let most = self.options.most_scratch;
        areas.filter(|areas| areas.scratch <= most).ok_or_else(|| ExecutorError::Buffers {
            plan: self.name.clone(),
            what: format!(
                "{scratch} chunks of scratch of {} bytes exceed the {most} bytes that are allowed",
                slicing.slice
            ),
        })
    }
}
