//! The named operations, once for all backends: each row of a table becomes a provided method of
//! [`Collectives`](super::Collectives) and one of [`StreamCollectives`](super::StreamCollectives).
//!
//! A row has the documentation, the name, the parameters, and the [`Call`](crate::Call) that is made of them. The names of some
//! parameters stand for tensors: `input` and `output`, `input?` and `output?` where the root alone needs one, and `buffer`,
//! which is both.

/// Gives every row to `$define!`, which defines a method.
macro_rules! named_operations {
    ($define:ident) => {
        rows! { $define;

        /// `output[i] = op over all ranks of input[i]`, on every rank; both of `n` elements.
        all_reduce(input, output, op: ReduceOp) = Call::all_reduce(op);

        /// [`all_reduce`](Self::all_reduce) where the result replaces the input.
        all_reduce_in_place(buffer, op: ReduceOp) = Call::all_reduce(op);

        /// [`all_reduce`](Self::all_reduce) as the options say, by a given [`Algorithm`](crate::all_reduce::Algorithm) for one;
        /// they are the same on all ranks.
        all_reduce_with(input, output, op: ReduceOp, options: impl Into<AllReduceOptions>) =
            Call::all_reduce(op).with_algorithm(options.into().number());

        /// The inputs of all ranks, one after the other: `n` elements in, `W·n` out.
        all_gather(input, output) = Call::all_gather();

        /// [`all_gather`](Self::all_gather) where each rank's input is its own block of the `W·n` elements.
        all_gather_in_place(buffer) = Call::all_gather();

        /// Rank `r` gets the reduction of all ranks' `r`-th blocks: `W·n` elements in, `n` out.
        reduce_scatter(input, output, op: ReduceOp) = Call::reduce_scatter(op);

        /// [`reduce_scatter`](Self::reduce_scatter) where the result replaces this rank's own block of the `W·n`
        /// elements; the other blocks keep their values.
        reduce_scatter_in_place(buffer, op: ReduceOp) = Call::reduce_scatter(op);

        /// Block `r` of the input goes to rank `r`, whose block comes to the same place of the output: `W·n` elements in,
        /// as many out.
        all_to_all(input, output) = Call::all_to_all();

        /// [`all_to_all`](Self::all_to_all) where the blocks that come replace those that go.
        all_to_all_in_place(buffer) = Call::all_to_all();

        /// [`all_to_all`](Self::all_to_all) with blocks of uneven lengths: `sends[r]` elements go to rank `r`,
        /// `receives[r]` come from it, packed in rank order. Counts that do not match are an error on every rank; on the host
        /// it is [`SplitsDisagree`](crate::CollectiveError::SplitsDisagree), which leaves the communicator usable.
        all_to_all_v(input, sends: &[usize], output, receives: &[usize]) = Call::all_to_all_v(sends, receives);

        /// [`all_gather`](Self::all_gather) with parts of uneven lengths: `counts[r]` elements come from rank `r`, to every
        /// rank. All ranks pass the same counts.
        all_gather_v(input, output, counts: &[usize]) = Call::all_gather_v(counts);

        /// [`reduce_scatter`](Self::reduce_scatter) with parts of uneven lengths: rank `r` gets the reduction of `counts[r]`
        /// elements of every rank. All ranks pass the same counts.
        reduce_scatter_v(input, output, counts: &[usize], op: ReduceOp) = Call::reduce_scatter_v(counts, op);

        /// Every rank's buffer gets the root's content.
        broadcast(buffer, root: usize) = Call::broadcast(root);

        /// Every rank's output gets the root's input; the other ranks pass `None`, or any input.
        broadcast_from(input?, output, root: usize) = Call::broadcast(root);

        /// The root's output becomes the reduction of all inputs; the others pass `None`, or anything.
        reduce(input, output?, op: ReduceOp, root: usize) = Call::reduce(op, root);

        /// [`reduce`](Self::reduce) where the result replaces the root's input; the other buffers keep their values.
        reduce_in_place(buffer, op: ReduceOp, root: usize) = Call::reduce(op, root);

        /// The root gets the inputs of all ranks, one after the other: `n` elements in, `W·n` out.
        gather(input, output?, root: usize) = Call::gather(root);

        /// Rank `r` gets the `r`-th block of the root's input: `W·n` elements in, `n` out.
        scatter(input?, output, root: usize) = Call::scatter(root);
        }
    };
}

/// Gives each row to [`row!`].
macro_rules! rows {
    ($define:ident; $($(#[$doc:meta])* $name:ident $parameters:tt = $call:expr;)*) => {
        $(row! { $define [$(#[$doc])*] $name $parameters = $call })*
    };
}

/// Gives `$define!` the documentation and the name of a method, its lifetimes and parameters with their types, and the method to
/// call with the call and its tensors.
macro_rules! row {
    ($define:ident $doc:tt $name:ident(input, output $(, $arg:ident: $type:ty)*) = $call:expr) => {
        $define! { $doc $name<'i, 'o>
            (input: impl Into<TensorView<'i>>, output: impl Into<TensorViewMut<'o>> $(, $arg: $type)*)
            call($call, Some(input.into()), Some(output.into())) }
    };
    ($define:ident $doc:tt $name:ident(input, $to:ident: $tos:ty, output, $from:ident: $froms:ty) = $call:expr) => {
        $define! { $doc $name<'i, 'o>
            (input: impl Into<TensorView<'i>>, $to: $tos, output: impl Into<TensorViewMut<'o>>, $from: $froms)
            call($call, Some(input.into()), Some(output.into())) }
    };
    ($define:ident $doc:tt $name:ident(input, output? $(, $arg:ident: $type:ty)*) = $call:expr) => {
        $define! { $doc $name<'i, 'o>
            (input: impl Into<TensorView<'i>>, output: Option<TensorViewMut<'o>> $(, $arg: $type)*)
            call($call, Some(input.into()), output) }
    };
    ($define:ident $doc:tt $name:ident(input?, output $(, $arg:ident: $type:ty)*) = $call:expr) => {
        $define! { $doc $name<'i, 'o>
            (input: Option<TensorView<'i>>, output: impl Into<TensorViewMut<'o>> $(, $arg: $type)*)
            call($call, input, Some(output.into())) }
    };
    ($define:ident $doc:tt $name:ident(buffer $(, $arg:ident: $type:ty)*) = $call:expr) => {
        $define! { $doc $name<'o>(buffer: impl Into<TensorViewMut<'o>> $(, $arg: $type)*)
            call_in_place($call, buffer.into()) }
    };
}
