//! The fused all-reduce on host memory: the algorithms of the bare one, and a loop over the rows of each piece of the
//! sum while it is in the cache.

mod arithmetic;
mod compiled;
mod contribution;
mod epilogue;
mod rounded;

use std::{cell::RefCell, ops::Range};

use antiphon_device::ReduceOp;
use antiphon_fabric::Communicator;

use super::{Accumulation, Source, Validated};
use crate::{
    all_reduce::{InOrder, carry_out},
    arguments::{Input, Output},
    error::{CollectiveError, Result},
};
use compiled::Loop;
use contribution::Contribution;
use epilogue::Epilogue;
use rounded::RoundedSum;

/// Memory that a communicator keeps between calls, so that a repeated call allocates nothing.
#[derive(Default)]
struct Scratch(Vec<f32>);

impl Scratch {
    /// Room for `count` numbers, which have the values that earlier calls left there.
    fn room(&mut self, count: usize) -> &mut [f32] {
        if self.0.len() < count {
            self.0.resize(count, 0.0);
        }
        &mut self.0[..count]
    }
}

pub(crate) fn run(comm: &Communicator, call: Validated) -> Result<()> {
    let scratch = comm.extension(|_| Ok::<_, CollectiveError>(RefCell::new(Scratch::default())))?;
    let mut scratch = scratch.borrow_mut();
    // Two rows, one of f32 and one of elements; and the sum, unless an output has room for it.
    let output = landing(&call);
    let own = if output.is_none() { call.num_bytes().div_ceil(size_of::<f32>()) } else { 0 };
    let (rows, sum) = scratch.room(2 * call.hidden + own).split_at_mut(2 * call.hidden);
    let sum = output.unwrap_or(sum.as_mut_ptr().cast());

    let input = match call.source {
        Source::Tensor { input } => input.cast_const(),
        _ => {
            // SAFETY: `Validated` holds what the loop reads, and `sum` is apart from it.
            unsafe { Loop::of::<Contribution>(call.dtype).run(&call, 0..call.tokens, sum, rows) };
            sum.cast_const()
        }
    };
    let mut rest = Rest { call: &call, epilogue: Loop::of::<Epilogue>(call.dtype), sum, rows, done: 0 };
    let mut arrived = |bytes| rest.finish_up_to(bytes);
    let arrived: &mut dyn FnMut(usize) = &mut arrived; // one copy of the algorithms
    let (count, dtype) = (call.tokens * call.hidden, call.dtype);
    let (input, output) = (Input { data: input, count, dtype }, Output { data: sum, count, dtype });
    let signature = |algorithm| call.signature(algorithm);
    let sum = InOrder::new(comm, dtype, ReduceOp::Sum);
    match call.accumulation {
        Accumulation::F32 => carry_out(comm, call.algorithm, signature, &input, &output, &sum, arrived),
        Accumulation::Rounded => {
            let sum = RoundedSum::new(sum, dtype.size());
            carry_out(comm, call.algorithm, signature, &input, &output, &sum, arrived)
        }
    }
}

/// An output that the sum may lie in until its rows are finished: itself, or one that is written later and read by
/// nobody before, but as the input of an all-reduce in place.
fn landing(call: &Validated) -> Option<*mut u8> {
    let residual_out = call.residual_out.filter(|_| call.residual != call.residual_out);
    call.sum_out.or(residual_out).or(call.norm_out)
}

/// The operations on the sum as it arrives.
struct Rest<'c> {
    call: &'c Validated,
    epilogue: Loop,
    sum: *mut u8,
    rows: &'c mut [f32],
    /// Tokens that are finished.
    done: usize,
}

impl Rest<'_> {
    /// Finishes all rows that end within the first `bytes` bytes of the sum.
    fn finish_up_to(&mut self, bytes: usize) {
        let tokens: Range<usize> = self.done..bytes / (self.call.hidden * self.call.dtype.size());
        self.done = tokens.end;
        // SAFETY: `Validated` holds the tensors that the loop reads and writes, and these rows of the sum are complete.
        unsafe { self.epilogue.run(self.call, tokens, self.sum, self.rows) };
    }
}
