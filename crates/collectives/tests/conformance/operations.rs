//! Every operation, called once and compared with what it must give: exactly those bits, nothing written beside the
//! output, no input changed.

use std::{cell::Cell, fmt::Display};

use antiphon_collectives::{
    Call, CollectiveError, ReduceOp,
    all_reduce::{Algorithm, AllReduceOptions},
};
use antiphon_operation::{Extent, InPlace, Operation, Root};
use antiphon_tensor::DType;
use antiphon_testing::Alignment;

use crate::{
    harness::{CollectiveBackend, Like, Loose, Tensor},
    named::has_method_in_place,
    values::Values,
};

/// The ways to all-reduce, which must not differ in a bit.
#[derive(Debug, Clone, Copy)]
pub enum Way {
    Automatic,
    InPlace,
    By(Algorithm),
}

impl Way {
    pub const ALL: [Self; 4] =
        [Self::Automatic, Self::InPlace, Self::By(Algorithm::OneShot), Self::By(Algorithm::TwoShot)];
}

/// Makes the content of an input from its dtype, a seed, and its number of elements.
pub type Content = fn(DType, u64, usize) -> Values;

/// A rank that calls operations on tensors of one dtype and knows what all ranks contribute: the inputs of a call follow from its
/// number, which is equal on all ranks that make the same calls.
pub struct Rank<'c, B: CollectiveBackend> {
    comm: &'c B,
    dtype: DType,
    alignment: Alignment,
    calls: Cell<u64>,
    passes_strange_tensors: bool,
    by_name: bool,
    content: Content,
}

impl<'c, B: CollectiveBackend> Rank<'c, B> {
    pub fn new(comm: &'c B, dtype: DType) -> Self {
        Self {
            comm,
            dtype,
            alignment: Alignment::Aligned,
            calls: Cell::new(0),
            passes_strange_tensors: false,
            by_name: false,
            content: Values::any_bits,
        }
    }

    /// With tensors that begin there.
    pub fn at(self, alignment: Alignment) -> Self {
        Self { alignment, ..self }
    }

    /// That passes a tensor of another dtype, of another length, strided where a rank need not pass one.
    pub fn with_strange_tensors(self) -> Self {
        Self { passes_strange_tensors: true, ..self }
    }

    /// That makes calls by the methods that are named after their operations.
    pub fn by_name(self) -> Self {
        Self { by_name: true, ..self }
    }

    /// With such inputs.
    pub fn holding(self, content: Content) -> Self {
        Self { content, ..self }
    }

    /// With inputs of its own.
    pub fn seeded(self, seed: u64) -> Self {
        Self { calls: Cell::new(seed << 32), ..self }
    }

    pub fn dtype(&self) -> DType {
        self.dtype
    }

    pub fn world(&self) -> usize {
        self.comm.world_size()
    }

    fn me(&self) -> usize {
        self.comm.rank()
    }

    fn next_call(&self) -> u64 {
        self.calls.replace(self.calls.get() + 1)
    }

    /// What each rank contributes to this call.
    fn inputs(&self, count: usize) -> Vec<Values> {
        let call = self.next_call();
        (0..self.world()).map(|rank| Values::any_bits(self.dtype, call << 8 | rank as u64, count)).collect()
    }

    fn tensor(&self, values: &Values) -> Tensor<B> {
        Tensor::holding(self.comm, values, self.alignment)
    }

    fn output(&self, count: usize) -> Tensor<B> {
        Tensor::unwritten(self.comm, self.dtype, count, self.alignment)
    }

    /// The call, for the message of a failure.
    fn what(&self, call: impl Display, count: usize) -> String {
        format!("{call} of {count} × {} on rank {} of {}", self.dtype, self.me(), self.world())
    }

    /// Makes a call of all ranks; whether it was carried out, and not refused as the backend must.
    fn make(
        &self,
        reduces: Option<ReduceOp>,
        call: impl FnOnce() -> Result<(), CollectiveError>,
        what: &str,
    ) -> bool {
        self.comm.before(self.dtype, reduces);
        let outcome = call();
        self.comm.behind();
        let Some(text) = reduces.and_then(|op| B::refusal(self.dtype, op, self.alignment)) else {
            succeeded(outcome, what);
            return true;
        };
        let error = outcome.expect_err(what).to_string();
        assert!(error.contains(text), "{what}: {error:?} does not say {text:?}");
        false
    }

    pub fn all_reduce(&self, count: usize, op: ReduceOp, way: Way) {
        let inputs = self.inputs(count);
        self.all_reduce_of(&inputs, &B::reduced(op, &inputs, self.comm.nodes().of_ranks()), op, way);
    }

    /// As [`all_reduce`](Self::all_reduce), of given contributions.
    pub fn all_reduce_of(&self, inputs: &[Values], expected: &Values, op: ReduceOp, way: Way) {
        let mine = &inputs[self.me()];
        let what = self.what(format_args!("all_reduce({op}, {way:?})"), mine.len());
        let (mut input, mut output) = (self.tensor(mine), self.output(mine.len()));
        let by = |input: &mut Tensor<B>, output: &mut Tensor<B>, options| {
            self.comm.all_reduce_with(input.view(), output.view_mut(), op, options)
        };
        let call = || match way {
            Way::Automatic => by(&mut input, &mut output, AllReduceOptions::default()),
            Way::By(algorithm) => by(&mut input, &mut output, algorithm.into()),
            Way::InPlace => self.comm.call_in_place(&Call::all_reduce(op), input.view_mut()),
        };
        let is_done = self.make(Some(op), call, &what);
        if let (Way::InPlace, true) = (way, is_done) {
            return input.assert_holds(expected, &what);
        }
        if is_done {
            output.assert_holds(expected, &what);
        }
        input.assert_holds(mine, format_args!("the input of {what}"));
    }

    /// An operation with blocks of `count` elements: apart, and in place where its row allows that.
    pub fn call(&self, call: &Call<'_>, count: usize) {
        self.calls(|_| call.clone(), count);
    }

    /// As [`call`](Self::call), where each rank has a call of its own.
    pub fn calls<'a>(&self, of: impl Fn(usize) -> Call<'a>, count: usize) {
        let calls: Vec<Call<'_>> = (0..self.world()).map(of).collect();
        self.apart(&calls, count);
        if calls[0].operation.row().in_place != InPlace::Never {
            self.in_place(&calls, count);
        }
    }

    /// Each rank's input, and what this rank must get: for every source the piece that is for this rank, reduced or one behind
    /// the other.
    fn contributions(&self, calls: &[Call<'_>], count: usize) -> (Vec<Values>, Values) {
        let (me, world, row) = (self.me(), self.world(), calls[0].operation.row());
        let number = self.next_call();
        let inputs: Vec<Values> = (0..world)
            .map(|rank| {
                let elements = calls[rank].input_layout(count, rank, world).elements();
                (self.content)(self.dtype, number << 8 | rank as u64, elements)
            })
            .collect();
        let sources =
            if row.root == Some(Root::Gives) { calls[me].root..calls[me].root + 1 } else { 0..world };
        let pieces: Vec<Values> = sources
            .map(|source| inputs[source].range(calls[source].input_layout(count, source, world).piece(me)))
            .collect();
        let expected = if row.reduces {
            B::reduced(calls[me].op, &pieces, self.comm.nodes().of_ranks())
        } else {
            Values::concat(&pieces)
        };
        (inputs, expected)
    }

    fn apart(&self, calls: &[Call<'_>], count: usize) {
        let call = &calls[self.me()];
        let ((inputs, expected), mine) = (self.contributions(calls, count), self.me());
        let what = self.what(format_args!("{call:?}"), count);
        let (input, mut output) = (self.tensor(&inputs[mine]), self.output(expected.len()));
        let (gives, gets) = (call.needs_input(mine), call.needs_output(mine));
        let strange = Like { dtype: DType::U8, count: 3, stride: 3 };
        let strange = || self.passes_strange_tensors.then(|| Loose::new(self.comm, strange));
        let (mut other_input, mut other_output) = (strange(), strange());
        let made = || {
            let from = if gives { Some(input.view()) } else { other_input.as_mut().map(Loose::view) };
            let to = if gets { Some(output.view_mut()) } else { other_output.as_mut().map(Loose::view_mut) };
            if self.by_name { self.comm.by_name(call, from, to) } else { self.comm.call(call, from, to) }
        };
        let is_done = self.make(call.operation.row().reduces.then_some(call.op), made, &what);
        if gets && is_done {
            output.assert_holds(&expected, &what);
        }
        input.assert_holds(&inputs[mine], format_args!("the input of {what}"));
    }

    fn in_place(&self, calls: &[Call<'_>], count: usize) {
        let (call, me, world) = (&calls[self.me()], self.me(), self.world());
        let (inputs, expected) = self.contributions(calls, count);
        let what = self.what(format_args!("{call:?} in place"), count);
        let mine = &inputs[me];
        let (before, after) = match call.operation.row().in_place {
            InPlace::InputBlock => {
                let row = Values::any_bits(self.dtype, 1, expected.len());
                let own = call.output_layout(count, me, world).piece(me);
                (row.with(own.start, mine), expected)
            }
            InPlace::OutputBlock => {
                let own = call.input_layout(count, me, world).piece(me);
                (mine.clone(), mine.clone().with(own.start, &expected))
            }
            _ if call.needs_output(me) => (mine.clone(), expected),
            _ => (mine.clone(), mine.clone()),
        };
        let mut buffer = self.tensor(&before);
        let reduces = call.operation.row().reduces.then_some(call.op);
        let made = || match self.by_name && has_method_in_place(call.operation) {
            true => self.comm.by_name_in_place(call, buffer.view_mut()),
            false => self.comm.call_in_place(call, buffer.view_mut()),
        };
        let is_done = self.make(reduces, made, &what);
        buffer.assert_holds(if is_done { &after } else { &before }, &what);
    }

    /// `counts(from, to)` elements go from rank to rank.
    pub fn all_to_all_v(&self, counts: impl Fn(usize, usize) -> usize) {
        self.calls(|rank| uneven(rank, self.world(), &counts), 0);
    }

    /// Every rank sends to the next rank and receives from the one before, itself in a world of one.
    pub fn ring(&self, count: usize) {
        let inputs = self.inputs(count);
        let what = self.what("send_recv round the ring", count);
        let (next, previous) =
            ((self.me() + 1) % self.world(), (self.me() + self.world() - 1) % self.world());
        let (input, mut output) = (self.tensor(&inputs[self.me()]), self.output(count));
        self.make(None, || self.comm.send_recv(input.view(), next, output.view_mut(), previous), &what);
        output.assert_holds(&inputs[previous], &what);
        input.assert_holds(&inputs[self.me()], format_args!("the input of {what}"));
    }
}

/// The all-to-all of a rank from which `counts(from, to)` elements go to each, and come from each.
pub fn uneven(rank: usize, world: usize, counts: impl Fn(usize, usize) -> usize) -> Call<'static> {
    let (sends, receives): (Vec<usize>, Vec<usize>) =
        (0..world).map(|peer| (counts(rank, peer), counts(peer, rank))).unzip();
    Call::all_to_all_v(sends, receives)
}

/// The operations of the table that [`Rank::call`] serves.
pub fn operations() -> impl Iterator<Item = Operation> {
    Operation::ALL.iter().copied().filter(|operation| operation.is_call())
}

/// An operation of `count` elements as each rank calls it: parts have lengths around that.
pub fn calls_of(operation: Operation, count: usize, world: usize) -> Vec<Call<'static>> {
    let (row, length) = (operation.row(), |index: usize| count * (1 + index % 3) / 2);
    (0..world)
        .map(|rank| match (row.input, row.output) {
            (Extent::Parts, Extent::Parts) => uneven(rank, world, |from, to| length(from + 2 * to)),
            _ => Call::new(operation).with_counts((0..world).map(length).collect::<Vec<_>>()),
        })
        .collect()
}

/// The value, or a panic that says what was called.
pub fn succeeded<R>(result: Result<R, impl Display>, what: impl Display) -> R {
    result.unwrap_or_else(|error| panic!("{what}: {error}"))
}
