//! Calls as values by the methods that are named after their operations, on host memory or in a stream.

/// Makes a call with tensors apart.
macro_rules! by_name {
    ($on:expr, $call:expr, $input:expr, $output:expr $(, $stream:expr)?) => {{
        let (on, call, input, output) = ($on, $call, $input, $output);
        let (op, root, counts, receives) = (call.op, call.root, &*call.counts, &*call.receives);
        let every_rank = "every rank passes both";
        match call.operation {
            Operation::Reduce => on.reduce(input.expect(every_rank), output, op, root $(, $stream)?),
            Operation::Gather => on.gather(input.expect(every_rank), output, root $(, $stream)?),
            Operation::Scatter => on.scatter(input, output.expect(every_rank), root $(, $stream)?),
            Operation::Broadcast => on.broadcast_from(input, output.expect(every_rank), root $(, $stream)?),
            operation => {
                let (input, output) = (input.expect(every_rank), output.expect(every_rank));
                match operation {
                    Operation::AllReduce => on.all_reduce(input, output, op $(, $stream)?),
                    Operation::AllGather => on.all_gather(input, output $(, $stream)?),
                    Operation::ReduceScatter => on.reduce_scatter(input, output, op $(, $stream)?),
                    Operation::AllToAll => on.all_to_all(input, output $(, $stream)?),
                    Operation::AllToAllV => on.all_to_all_v(input, counts, output, receives $(, $stream)?),
                    Operation::AllGatherV => on.all_gather_v(input, output, counts $(, $stream)?),
                    Operation::ReduceScatterV => on.reduce_scatter_v(input, output, counts, op $(, $stream)?),
                    other => panic!("{other} has no method"),
                }
            }
        }
    }};
}

/// Makes a call in place.
macro_rules! by_name_in_place {
    ($on:expr, $call:expr, $buffer:expr $(, $stream:expr)?) => {{
        let (on, call, buffer) = ($on, $call, $buffer);
        match call.operation {
            Operation::AllReduce => on.all_reduce_in_place(buffer, call.op $(, $stream)?),
            Operation::AllGather => on.all_gather_in_place(buffer $(, $stream)?),
            Operation::ReduceScatter => on.reduce_scatter_in_place(buffer, call.op $(, $stream)?),
            Operation::AllToAll => on.all_to_all_in_place(buffer $(, $stream)?),
            Operation::Broadcast => on.broadcast(buffer, call.root $(, $stream)?),
            Operation::Reduce => on.reduce_in_place(buffer, call.op, call.root $(, $stream)?),
            other => panic!("{other} has no method in place"),
        }
    }};
}
