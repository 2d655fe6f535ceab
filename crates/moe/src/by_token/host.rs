//! Dispatch and combine by token on host memory.

use antiphon_device::{ReduceOp, host::reduce::Reducer};
use antiphon_fabric::{Communicator, Signature};
use antiphon_tensor::DType;

use crate::{
    ByTokenRoutes, Moe,
    error::Result,
    routes::Source,
    tensors::{Ids, write_id},
    transport::{Records, Term, row, row_mut, word},
};

/// The memory that rows come from, without the ids.
pub(super) struct Part<'a> {
    pub(super) row: &'a [u8],
    pub(super) scales: &'a [u8],
    pub(super) weights: &'a [u8],
}

/// A dispatch of rows along routes.
pub(super) struct Rows<'a> {
    pub(super) signature: Signature,
    pub(super) top_k: usize,
    pub(super) from: Part<'a>,
    pub(super) ids: Option<Ids<'a>>,
    pub(super) row_bytes: usize,
    pub(super) scale_bytes: usize,
}

/// The memory that rows go to.
pub(super) struct Received<'a> {
    pub(super) row: &'a mut [u8],
    pub(super) scales: &'a mut [u8],
    /// Ids and weights.
    pub(super) choices: Option<(&'a mut [u8], &'a mut [u8])>,
    pub(super) id_bytes: usize,
}

/// A record is the row, the scales, the weights, the ids.
impl Rows<'_> {
    fn record(&self) -> usize {
        self.row_bytes + self.scale_bytes + self.top_k * 8
    }

    pub(super) fn run(
        self,
        moe: &mut Moe,
        comm: &Communicator,
        routes: &ByTokenRoutes,
        mut to: Received<'_>,
    ) -> Result<()> {
        let records = Records {
            call: "dispatch",
            signature: self.signature,
            bytes: self.record(),
            traffic: &routes.traffic,
            tokens: &routes.tokens,
        };
        let write = |index: usize, record: &mut [u8]| self.write(index, record);
        let sources = records.pull(moe, comm, write, |at, record| self.take(record, routes, at, &mut to))?;
        for at in routes.num_received()..routes.rows() {
            let Some((ids, _)) = &mut to.choices else { break };
            row_mut(ids, self.top_k * to.id_bytes, at)
                .chunks_exact_mut(to.id_bytes)
                .for_each(|id| write_id(id, -1));
        }
        routes.sources.get_or_init(|| sources);
        Ok(())
    }

    /// Writes a token's record.
    fn write(&self, index: usize, record: &mut [u8]) {
        let weight_bytes = self.top_k * 4;
        let (rows, rest) = record.split_at_mut(self.row_bytes);
        let (scales, rest) = rest.split_at_mut(self.scale_bytes);
        rows.copy_from_slice(row(self.from.row, self.row_bytes, index));
        scales.copy_from_slice(row(self.from.scales, self.scale_bytes, index));
        let Some(ids) = &self.ids else { return };
        let (weights, rest) = rest.split_at_mut(weight_bytes);
        weights.copy_from_slice(row(self.from.weights, weight_bytes, index));
        for (k, place) in rest.chunks_exact_mut(4).take(self.top_k).enumerate() {
            let id = ids.get(index * self.top_k + k).map_or(-1, |id| id as i32);
            place.copy_from_slice(&id.to_ne_bytes());
        }
    }

    /// Copies a record to a received row.
    fn take(&self, record: &[u8], routes: &ByTokenRoutes, at: usize, to: &mut Received<'_>) {
        let (rows, rest) = record.split_at(self.row_bytes);
        let (scales, rest) = rest.split_at(self.scale_bytes);
        row_mut(to.row, self.row_bytes, at).copy_from_slice(rows);
        row_mut(to.scales, self.scale_bytes, at).copy_from_slice(scales);
        let Some((ids, weights)) = &mut to.choices else { return };
        let (from_weights, from_ids) = rest.split_at(self.top_k * 4);
        let local = routes.num_experts / routes.traffic.world_size;
        let first = (routes.traffic.rank * local) as i32;
        let places = row_mut(ids, self.top_k * to.id_bytes, at).chunks_exact_mut(to.id_bytes);
        let weights = row_mut(weights, self.top_k * 4, at).chunks_exact_mut(4);
        let choices = from_ids.chunks_exact(4).zip(from_weights.chunks_exact(4));
        for ((place, weight), (id, from_weight)) in places.zip(weights).zip(choices) {
            let id = word(id) as i32 - first;
            let is_here = (0..local as i32).contains(&id);
            write_id(place, if is_here { id } else { -1 });
            weight.copy_from_slice(if is_here { from_weight } else { &[0; 4] });
        }
    }
}

/// A combine of rows along routes.
pub(super) struct Sums<'a> {
    pub(super) signature: Signature,
    pub(super) dtype: DType,
    pub(super) hidden: usize,
    pub(super) top_k: usize,
    pub(super) rows: &'a [u8],
    pub(super) weights: &'a [u8],
    pub(super) biases: [Option<&'a [u8]>; 2],
}

impl Sums<'_> {
    fn row_bytes(&self) -> usize {
        self.hidden * self.dtype.size()
    }

    fn record(&self) -> usize {
        self.row_bytes() + self.top_k * 4
    }

    pub(super) fn run(
        self,
        moe: &mut Moe,
        comm: &Communicator,
        routes: &ByTokenRoutes,
        sources: &[Source],
        output: &mut [u8],
        output_weights: &mut [u8],
    ) -> Result<()> {
        let (row_bytes, weight_bytes) = (self.row_bytes(), self.top_k * 4);
        let records = Records {
            call: "combine",
            signature: self.signature,
            bytes: self.record(),
            traffic: &routes.traffic,
            tokens: &routes.tokens,
        };
        // Rows, then weights: where they begin in a record, those of this rank, how many each has, and where sums go.
        let mut parts = [
            (0, row_bytes, self.rows, self.hidden, Reducer::new(self.dtype, ReduceOp::Sum), output),
            (
                row_bytes,
                weight_bytes,
                self.weights,
                self.top_k,
                Reducer::new(DType::F32, ReduceOp::Sum),
                output_weights,
            ),
        ];
        let mut pointers = Vec::with_capacity(2 + routes.traffic.world_size);
        let write = |at: usize, record: &mut [u8]| {
            let (rows, weights) = record.split_at_mut(row_bytes);
            rows.copy_from_slice(row(self.rows, row_bytes, at));
            weights.copy_from_slice(row(self.weights, weight_bytes, at));
        };
        records.push(moe, comm, sources, write, |index, terms| {
            for (part, (offset, bytes, own_rows, count, reducer, output)) in parts.iter_mut().enumerate() {
                if *bytes == 0 {
                    continue;
                }
                pointers.clear();
                let biases = self.biases.iter().flatten().filter(|_| part == 0);
                pointers.extend(biases.map(|bias| row(bias, *bytes, index).as_ptr()));
                pointers.extend(terms.iter().map(|term| match *term {
                    Term::Own(at) => row(own_rows, *bytes, at).as_ptr(),
                    Term::From(_, record) => record[*offset..][..*bytes].as_ptr(),
                }));
                let output = row_mut(output, *bytes, index);
                match pointers.is_empty() {
                    true => output.fill(0),
                    // SAFETY: the output's row and each of the sources have `count` elements; no rank writes the sources, which
                    // are inputs, records that have come, and copies of such.
                    false => unsafe { reducer.run(output.as_mut_ptr(), &pointers, *count) },
                }
            }
        })
    }
}
