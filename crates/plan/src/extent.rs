//! The offsets of chunks, in bytes.

use std::ops::Range;

use crate::error::PlanError;
use crate::op::GroupShare;
use crate::plan::Plan;

/// Where chunks begin in bytes, for one message (MSCCL++ 0.9.0, `ExecutionPlan::Impl::getOffset`).
///
/// Input and output are multiples of the plan's alignment, and have whole chunks of the same size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    chunk: u64,
    alignment: u64,
}

impl Extent {
    /// For tensors of these numbers of bytes on a rank whose buffers have the chunks of the first rank's (the format
    /// gives all ranks the same).
    ///
    /// # Errors
    /// [`PlanError::Sizes`] if a size is not a whole number of aligned chunks, if input and output disagree about the
    /// size of a chunk, or if the message (the output of `allgather`, else the input) is outside the plan's limits.
    pub fn new(plan: &Plan, input_bytes: u64, output_bytes: u64) -> Result<Self, PlanError> {
        let wrong = |what: String| PlanError::Sizes { plan: plan.name.clone().unwrap_or_default(), what };
        let alignment = plan.buffer_alignment;
        let (input_chunks, output_chunks) =
            plan.gpus.first().map_or((0, 0), |gpu| (gpu.input_chunks, gpu.output_chunks));
        let message = if plan.collective == "allgather" { output_bytes } else { input_bytes };
        if !(plan.min_message_size..=plan.max_message_size).contains(&message) {
            let (min, max) = (plan.min_message_size, plan.max_message_size);
            return Err(wrong(format!("serves messages of {min} to {max} bytes, not {message}")));
        }
        let chunk_of = |what: &str, bytes: u64, chunks: u64| match chunks {
            0 if bytes == 0 => Ok(None),
            0 => Err(wrong(format!("has no {what}, but {bytes} bytes are given"))),
            _ if !bytes.is_multiple_of(alignment) || !(bytes / alignment).is_multiple_of(chunks) => {
                Err(wrong(format!(
                    "{what} of {bytes} bytes is not {chunks} chunks of whole multiples of {alignment} bytes"
                )))
            }
            _ => Ok(Some(bytes / chunks)),
        };
        let input = chunk_of("input", input_bytes, input_chunks)?;
        let output = chunk_of("output", output_bytes, output_chunks)?;
        match (input, output) {
            (Some(input), Some(output)) if input != output => {
                Err(wrong(format!("the input's chunks have {input} bytes, the output's {output}")))
            }
            (Some(chunk), _) | (None, Some(chunk)) => Ok(Extent { chunk, alignment }),
            (None, None) => Ok(Extent { chunk: 0, alignment }),
        }
    }

    /// With chunks of some bytes, a multiple of the alignment.
    pub(crate) fn of_chunk(chunk: u64, alignment: u64) -> Self {
        Extent { chunk, alignment }
    }

    /// Bytes of a chunk.
    pub fn chunk(&self) -> u64 {
        self.chunk
    }

    /// The same message, of whose chunks only `chunk` bytes each are looked at: what a plan does with chunks it does with
    /// equal parts of them.
    pub fn part(&self, chunk: u64) -> Self {
        Extent { chunk, ..*self }
    }

    /// Bytes of which a thread block's share is a multiple.
    pub fn alignment(&self) -> u64 {
        self.alignment
    }

    /// The bytes of some chunks; if they overflow 64 bits, none.
    pub fn bytes(&self, chunks: &Range<u64>) -> Option<Range<u64>> {
        Some(chunks.start.checked_mul(self.chunk)?..chunks.end.checked_mul(self.chunk)?)
    }

    /// A thread block's share of some bytes: whole units of the alignment, the first blocks one more where they do not
    /// divide evenly, and the last unit perhaps cut.
    pub fn share(&self, bytes: &Range<u64>, group: GroupShare) -> Range<u64> {
        let units = (bytes.end - bytes.start).div_ceil(self.alignment);
        let (tb_id, size) = (u64::from(group.tb_id), u64::from(group.tbg_size));
        let start_of =
            |block: u64| bytes.start + (units / size * block + block.min(units % size)) * self.alignment;
        start_of(tb_id).min(bytes.end)..start_of(tb_id + 1).min(bytes.end)
    }
}
