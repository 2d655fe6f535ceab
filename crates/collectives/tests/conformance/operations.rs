//! Every operation, called once and compared with what it must give: exactly those bits, nothing written beside the
//! output, no input changed.

use std::{cell::Cell, fmt::Display, marker::PhantomData};

use antiphon_collectives::{Collectives, Communicator, ReduceOp, all_reduce::Algorithm};
use antiphon_tensor::DType;

use crate::{
    harness::{Backend, Place, Tensor},
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

/// A rank that calls operations on tensors of one dtype and knows what all ranks contribute: the inputs of a call follow from its number,
/// which is equal on all ranks that make the same calls.
pub struct Rank<'c, B> {
    comm: &'c Communicator,
    dtype: DType,
    place: Place,
    calls: Cell<u64>,
    backend: PhantomData<B>,
}

impl<'c, B: Backend> Rank<'c, B> {
    pub fn new(comm: &'c Communicator, dtype: DType) -> Self {
        Self { comm, dtype, place: Place::Aligned, calls: Cell::new(0), backend: PhantomData }
    }

    /// With tensors that begin there.
    pub fn at(self, place: Place) -> Self {
        Self { place, ..self }
    }

    /// With inputs of its own.
    pub fn seeded(self, seed: u64) -> Self {
        Self { calls: Cell::new(seed << 32), ..self }
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

    /// Everybody's block for this rank.
    fn column(&self, rows: &[Values]) -> Vec<Values> {
        rows.iter().map(|row| row.block(self.me(), self.world())).collect()
    }

    fn tensor(&self, values: &Values) -> Tensor<B> {
        Tensor::holding(values, self.place)
    }

    fn output(&self, count: usize) -> Tensor<B> {
        Tensor::unwritten(self.dtype, count, self.place)
    }

    /// The call, for the message of a failure.
    fn what(&self, call: impl Display, count: usize) -> String {
        format!("{call} of {count} × {} on rank {} of {}", self.dtype, self.me(), self.world())
    }

    pub fn all_reduce(&self, count: usize, op: ReduceOp, way: Way) {
        let inputs = self.inputs(count);
        self.all_reduce_of(&inputs, &Values::reduced(op, &inputs), op, way);
    }

    /// As [`all_reduce`](Self::all_reduce), of given contributions.
    pub fn all_reduce_of(&self, inputs: &[Values], expected: &Values, op: ReduceOp, way: Way) {
        let mine = &inputs[self.me()];
        let what = self.what(format_args!("all_reduce({op}, {way:?})"), mine.len());
        let (mut input, mut output) = (self.tensor(mine), self.output(mine.len()));
        let done = match way {
            Way::Automatic => self.comm.all_reduce(input.view(), output.view_mut(), op),
            Way::By(algorithm) => self.comm.all_reduce_with(input.view(), output.view_mut(), op, algorithm),
            Way::InPlace => self.comm.all_reduce_in_place(input.view_mut(), op),
        };
        succeeded(done, &what);
        if let Way::InPlace = way {
            return input.assert_holds(expected, &what);
        }
        output.assert_holds(expected, &what);
        input.assert_holds(mine, format_args!("the input of {what}"));
    }

    pub fn all_gather(&self, count: usize) {
        let inputs = self.inputs(count);
        let what = self.what("all_gather", count);
        let (mut input, mut output) = (self.tensor(&inputs[self.me()]), self.output(self.world() * count));
        succeeded(self.comm.all_gather(input.view(), output.view_mut()), &what);
        output.assert_holds(&Values::concat(&inputs), &what);
        input.assert_holds(&inputs[self.me()], format_args!("the input of {what}"));
    }

    pub fn all_gather_in_place(&self, count: usize) {
        let inputs = self.inputs(count);
        let what = self.what("all_gather_in_place", count);
        let row = Values::any_bits(self.dtype, 1, self.world() * count);
        let mut buffer = self.tensor(&row.with_block(self.me(), &inputs[self.me()]));
        succeeded(self.comm.all_gather_in_place(buffer.view_mut()), &what);
        buffer.assert_holds(&Values::concat(&inputs), &what);
    }

    pub fn reduce_scatter(&self, count: usize, op: ReduceOp) {
        let rows = self.inputs(self.world() * count);
        let what = self.what(format_args!("reduce_scatter({op})"), count);
        let (mut input, mut output) = (self.tensor(&rows[self.me()]), self.output(count));
        succeeded(self.comm.reduce_scatter(input.view(), output.view_mut(), op), &what);
        output.assert_holds(&Values::reduced(op, &self.column(&rows)), &what);
        input.assert_holds(&rows[self.me()], format_args!("the input of {what}"));
    }

    pub fn reduce_scatter_in_place(&self, count: usize, op: ReduceOp) {
        let rows = self.inputs(self.world() * count);
        let what = self.what(format_args!("reduce_scatter_in_place({op})"), count);
        let mut buffer = self.tensor(&rows[self.me()]);
        succeeded(self.comm.reduce_scatter_in_place(buffer.view_mut(), op), &what);
        let result = Values::reduced(op, &self.column(&rows));
        buffer.assert_holds(&rows[self.me()].clone().with_block(self.me(), &result), &what);
    }

    pub fn all_to_all(&self, count: usize) {
        let rows = self.inputs(self.world() * count);
        let what = self.what("all_to_all", count);
        let (mut input, mut output) = (self.tensor(&rows[self.me()]), self.output(self.world() * count));
        succeeded(self.comm.all_to_all(input.view(), output.view_mut()), &what);
        output.assert_holds(&Values::concat(&self.column(&rows)), &what);
        input.assert_holds(&rows[self.me()], format_args!("the input of {what}"));
    }

    pub fn all_to_all_in_place(&self, count: usize) {
        let rows = self.inputs(self.world() * count);
        let what = self.what("all_to_all_in_place", count);
        let mut buffer = self.tensor(&rows[self.me()]);
        succeeded(self.comm.all_to_all_in_place(buffer.view_mut()), &what);
        buffer.assert_holds(&Values::concat(&self.column(&rows)), &what);
    }

    /// `counts(from, to)` elements go from rank to rank.
    pub fn all_to_all_v(&self, counts: impl Fn(usize, usize) -> usize) {
        let (me, everyone) = (self.me(), 0..self.world());
        let (sends, receives): (Vec<usize>, Vec<usize>) =
            everyone.clone().map(|peer| (counts(me, peer), counts(peer, me))).unzip();
        let call = self.next_call();
        let between = |from: usize, to: usize| {
            Values::any_bits(self.dtype, call << 8 | (from * self.world() + to) as u64, counts(from, to))
        };
        let outgoing = Values::concat(&everyone.clone().map(|to| between(me, to)).collect::<Vec<_>>());
        let expected = Values::concat(&everyone.map(|from| between(from, me)).collect::<Vec<_>>());
        let what = self.what(format_args!("all_to_all_v({sends:?}, {receives:?})"), outgoing.len());
        let (mut input, mut output) = (self.tensor(&outgoing), self.output(expected.len()));
        succeeded(self.comm.all_to_all_v(input.view(), &sends, output.view_mut(), &receives), &what);
        output.assert_holds(&expected, &what);
        input.assert_holds(&outgoing, format_args!("the input of {what}"));
    }

    pub fn broadcast(&self, count: usize, root: usize) {
        let inputs = self.inputs(count);
        let what = self.what(format_args!("broadcast(root {root})"), count);
        let mut buffer = self.tensor(&inputs[self.me()]);
        succeeded(self.comm.broadcast(buffer.view_mut(), root), &what);
        buffer.assert_holds(&inputs[root], &what);
    }

    pub fn broadcast_from(&self, count: usize, root: usize) {
        let inputs = self.inputs(count);
        let what = self.what(format_args!("broadcast_from(root {root})"), count);
        let (mut input, mut output) = (self.tensor(&inputs[root]), self.output(count));
        let given = (self.me() == root).then(|| input.view());
        succeeded(self.comm.broadcast_from(given, output.view_mut(), root), &what);
        output.assert_holds(&inputs[root], &what);
        input.assert_holds(&inputs[root], format_args!("the input of {what}"));
    }

    pub fn reduce(&self, count: usize, op: ReduceOp, root: usize) {
        let inputs = self.inputs(count);
        let what = self.what(format_args!("reduce({op}, root {root})"), count);
        let (mut input, mut output) = (self.tensor(&inputs[self.me()]), self.output(count));
        let wanted = (self.me() == root).then(|| output.view_mut());
        succeeded(self.comm.reduce(input.view(), wanted, op, root), &what);
        if self.me() == root {
            output.assert_holds(&Values::reduced(op, &inputs), &what);
        }
        input.assert_holds(&inputs[self.me()], format_args!("the input of {what}"));
    }

    pub fn reduce_in_place(&self, count: usize, op: ReduceOp, root: usize) {
        let inputs = self.inputs(count);
        let what = self.what(format_args!("reduce_in_place({op}, root {root})"), count);
        let mut buffer = self.tensor(&inputs[self.me()]);
        succeeded(self.comm.reduce_in_place(buffer.view_mut(), op, root), &what);
        let expected = match self.me() == root {
            true => Values::reduced(op, &inputs),
            false => inputs[self.me()].clone(),
        };
        buffer.assert_holds(&expected, &what);
    }

    pub fn gather(&self, count: usize, root: usize) {
        let inputs = self.inputs(count);
        let what = self.what(format_args!("gather(root {root})"), count);
        let (mut input, mut output) = (self.tensor(&inputs[self.me()]), self.output(self.world() * count));
        let wanted = (self.me() == root).then(|| output.view_mut());
        succeeded(self.comm.gather(input.view(), wanted, root), &what);
        if self.me() == root {
            output.assert_holds(&Values::concat(&inputs), &what);
        }
        input.assert_holds(&inputs[self.me()], format_args!("the input of {what}"));
    }

    pub fn scatter(&self, count: usize, root: usize) {
        let rows = self.inputs(self.world() * count);
        let what = self.what(format_args!("scatter(root {root})"), count);
        let (mut input, mut output) = (self.tensor(&rows[root]), self.output(count));
        let given = (self.me() == root).then(|| input.view());
        succeeded(self.comm.scatter(given, output.view_mut(), root), &what);
        output.assert_holds(&rows[root].block(self.me(), self.world()), &what);
        input.assert_holds(&rows[root], format_args!("the input of {what}"));
    }

    /// Everyone sends to the next rank and receives from the one before, itself in a world of one.
    pub fn ring(&self, count: usize) {
        let inputs = self.inputs(count);
        let what = self.what("send_recv round the ring", count);
        let (next, previous) =
            ((self.me() + 1) % self.world(), (self.me() + self.world() - 1) % self.world());
        let (mut input, mut output) = (self.tensor(&inputs[self.me()]), self.output(count));
        succeeded(self.comm.send_recv(input.view(), next, output.view_mut(), previous), &what);
        output.assert_holds(&inputs[previous], &what);
        input.assert_holds(&inputs[self.me()], format_args!("the input of {what}"));
    }
}

/// The value, or a panic that says what was called.
pub fn succeeded<R>(result: Result<R, impl Display>, what: impl Display) -> R {
    result.unwrap_or_else(|error| panic!("{what}: {error}"))
}
