//! Times collectives of float32 on host memory between the ranks that a launcher starts, on several nodes in both forms.
//! [`nodes.py`](../../../benches/nodes.py) runs it between two network namespaces, beside gloo.
//!
//! Each line of rank 0 is an operation, the bytes of its longest tensor, the form, and the median over batches of the slowest rank's
//! microseconds. Of a mixed operation the form is a mode, behind the tensor parallel ranks of a node and nodes: `1x2/bytes2`, `1x2/auto`.

use std::time::Instant;

use antiphon_collectives::{
    Call, Collectives, Communicator, ReduceOp, Result,
    all_reduce::Algorithm,
    hierarchical::{Form, prefer},
    mixed::{MixedCall, MixedHandler, MixedLayout, MixedMode, MixedOp, operation_of},
};
use antiphon_fabric::Operation;
use antiphon_tensor::{TensorView, TensorViewMut};

const BATCHES: usize = 9;

/// The microseconds of a call.
fn time(comm: &Communicator, bytes: usize, call: &dyn Fn() -> Result<()>) -> Result<f64> {
    let calls = ((8 << 20) / (bytes + (16 << 10))).clamp(3, 300);
    let mut times = Vec::new();
    for _ in 0..BATCHES {
        comm.barrier()?;
        let start = Instant::now();
        for _ in 0..calls {
            call()?;
        }
        let own = start.elapsed().as_secs_f64() / calls as f64 * 1e6;
        times.push(comm.exchange_objects(&own)?.into_iter().fold(0.0, f64::max));
    }
    times.sort_by(f64::total_cmp);
    Ok(times[BATCHES / 2])
}

/// The microseconds of a mixed operation of two tensor parallel sizes and a mode, as in `1x2/auto`.
fn mixed(
    comm: &Communicator,
    op: MixedOp,
    bytes: usize,
    form: &str,
) -> std::result::Result<f64, Box<dyn std::error::Error>> {
    let (tp, mode) = form.split_once('/').ok_or("the form of a mixed operation is TPxTP/MODE")?;
    let (local_tp, inter_tp) = tp.split_once('x').ok_or("two tensor parallel sizes are written as 1x2")?;
    let layout = MixedLayout::builder(comm.world_size(), comm.rank())
        .inter_size(comm.nodes().count())
        .local_tp(local_tp.parse()?)
        .inter_tp(inter_tp.parse()?)
        .build()?;
    let handler = MixedHandler::new(comm, layout)?;
    let call = MixedCall::from(op).mode(MixedMode::ALL.into_iter().find(|known| known.name() == mode));
    let block = bytes / size_of::<f32>() / layout.dp_size();
    let (short, long) = (vec![1f32; block], vec![1f32; block * layout.dp_size()]);
    let output =
        std::cell::RefCell::new(if op == MixedOp::AllReduceAllGather { long.clone() } else { short.clone() });
    let input = if op == MixedOp::AllReduceAllGather { &short } else { &long };
    let run = || handler.run(comm, call, input, &mut *output.borrow_mut());
    run()?;
    Ok(time(comm, bytes, &run)?)
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let comm = Communicator::from_env()?;
    let (rank, world_size) = (comm.rank(), comm.world_size());
    for argument in std::env::args().skip(1) {
        let [operation, bytes, form] = argument.split(':').collect::<Vec<_>>()[..] else {
            return Err(format!("{argument} is not OPERATION:BYTES:FORM").into());
        };
        let operation = Operation::ALL.iter().copied().find(|known| known.name() == operation);
        let operation = operation.ok_or("no such operation")?;
        let bytes: usize = bytes.parse()?;
        let mixes = MixedOp::ALL.into_iter().find(|&op| operation_of(op) == operation && form.contains('/'));
        if let Some(op) = mixes {
            let time = mixed(&comm, op, bytes, form)?;
            if rank == 0 {
                println!("{} {bytes} {form} {time:.1}", operation.name());
            }
            continue;
        }
        let (form_of, algorithm) = match form {
            "one-shot" => (None, Some(Algorithm::OneShot)),
            "mirrored" => (Some(Form::Mirrored), Some(Algorithm::TwoShot)),
            "hierarchical" => (Some(Form::Hierarchical), Some(Algorithm::TwoShot)),
            _ => (None, None),
        };
        prefer(&comm, form_of)?;
        let elements = bytes / size_of::<f32>();
        let row = operation == Operation::AllGather || operation == Operation::ReduceScatter;
        let block = if row { elements / world_size } else { elements };
        let call = Call::new(operation);
        let call = match algorithm {
            Some(algorithm) if operation == Operation::AllReduce => call.with_algorithm(algorithm as u8),
            _ => call,
        };
        let call = call.with_op(ReduceOp::Sum);
        let input = vec![1f32; call.input_layout(block, rank, world_size).elements()];
        let output =
            std::cell::RefCell::new(vec![0f32; call.output_layout(block, rank, world_size).elements()]);
        let run = || {
            let mut output = output.borrow_mut();
            comm.call(&call, Some(TensorView::from(&input)), Some(TensorViewMut::from(&mut *output)))
        };
        run()?;
        let time = time(&comm, bytes, &run)?;
        if rank == 0 {
            println!("{} {bytes} {form} {time:.1}", operation.name());
        }
    }
    Ok(())
}
