//! The collective that a program implements.

/// The collective that a program implements: its name in the plan, and the buffers of each rank.
///
/// Sizes are in chunks; the chunk factor says into how many chunks each rank's part of the message is divided. As in
/// MSCCL++ 0.9.0, `mscclpp.language.collectives`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Collective {
    /// The collective's name in the plan.
    pub name: String,
    /// Whether input and output share memory. It stands in the plan; the program's buffers remain two.
    pub inplace: bool,
    /// Chunks of each rank's input and output.
    pub buffers: Vec<BufferChunks>,
}

/// Chunks of one rank's buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BufferChunks {
    /// The chunks of a rank's input.
    pub input: u64,
    /// The chunks of a rank's output.
    pub output: u64,
}

impl Collective {
    /// Every rank gets the parts of all ranks: `chunk_factor` chunks in, those of all ranks out.
    pub fn all_gather(num_ranks: u32, chunk_factor: u64) -> Self {
        Self::uniform("allgather", num_ranks, chunk_factor, all(num_ranks, chunk_factor))
    }

    /// Every rank gets the reduction of all inputs: `num_ranks × chunk_factor` chunks in and out.
    pub fn all_reduce(num_ranks: u32, chunk_factor: u64) -> Self {
        let chunks = all(num_ranks, chunk_factor);
        Self::uniform("allreduce", num_ranks, chunks, chunks)
    }

    /// Every rank gets its part of the reduction: `num_ranks × chunk_factor` chunks in, `chunk_factor` out.
    pub fn reduce_scatter(num_ranks: u32, chunk_factor: u64) -> Self {
        Self::uniform("reducescatter", num_ranks, all(num_ranks, chunk_factor), chunk_factor)
    }

    /// Every rank gets a part of each: `num_ranks × chunk_factor` chunks in and out.
    pub fn all_to_all(num_ranks: u32, chunk_factor: u64) -> Self {
        let chunks = all(num_ranks, chunk_factor);
        Self::uniform("alltoall", num_ranks, chunks, chunks)
    }

    /// Some ranks send to others: `chunk_factor` chunks in and out.
    pub fn send_recv(num_ranks: u32, chunk_factor: u64) -> Self {
        Self::uniform("sendrecv", num_ranks, chunk_factor, chunk_factor)
    }

    /// Anything else, with these numbers of chunks at every rank.
    pub fn custom(name: &str, num_ranks: u32, input: u64, output: u64) -> Self {
        Self::uniform(name, num_ranks, input, output)
    }

    /// The same in place, or not.
    pub fn inplace(self, inplace: bool) -> Self {
        Collective { inplace, ..self }
    }

    fn uniform(name: &str, num_ranks: u32, input: u64, output: u64) -> Self {
        let buffers = vec![BufferChunks { input, output }; num_ranks as usize];
        Collective { name: name.to_owned(), inplace: false, buffers }
    }
}

fn all(num_ranks: u32, chunk_factor: u64) -> u64 {
    u64::from(num_ranks).saturating_mul(chunk_factor)
}
