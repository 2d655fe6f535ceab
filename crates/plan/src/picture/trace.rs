//! The Chrome trace event format, which Perfetto reads.

use serde_json::{Value, json};

use crate::ids::Rank;
use crate::plan::Plan;
use crate::simulate::{Lane, Simulation, Span};

/// The numbers of tracks: those of thread blocks come first, and the engines' from here on.
const COPY_ENGINE: u32 = 1 << 30;
const NIC: u32 = COPY_ENGINE + 1;

/// The simulation as JSON in the Chrome trace event format: a process for each rank, a thread for each thread block and
/// engine, a flow for each signal and each packet that an operation waited for. Times in µs from the kernel's start.
pub fn trace(plan: &Plan, simulation: &Simulation) -> String {
    let mut events = Vec::new();
    for (rank, gpu) in plan.gpus.iter().enumerate() {
        let rank = Rank(rank as u32);
        events.push(name(rank, 0, "process_name", format!("rank {rank}")));
        events.push(
            json!({"ph": "M", "pid": rank.0, "name": "process_sort_index", "args": {"sort_index": rank.0}}),
        );
        for block in &gpu.threadblocks {
            events.push(name(rank, block.id, "thread_name", format!("thread block {}", block.id)));
        }
        events.push(name(rank, COPY_ENGINE, "thread_name", "copy engine".into()));
        events.push(name(rank, NIC, "thread_name", "network card".into()));
    }
    for span in &simulation.spans {
        events.push(json!({
            "ph": "X", "pid": span.place.rank.0, "tid": track(span), "name": plan.op(span.place).map(|op| op.kind.name()), "cat": "op",
            "ts": micro(span.start_ns), "dur": micro(span.end_ns - span.start_ns),
            "args": {"op": span.place.op, "inner": span.place.inner, "turn": span.turn, "bytes": span.bytes},
        }));
    }
    for (id, arrow) in simulation.arrows.iter().enumerate() {
        let Some(to) = arrow.to.map(|to| &simulation.spans[to.index()]) else { continue };
        let from = &simulation.spans[arrow.from.index()];
        let ends = [("s", from, from.end_ns), ("f", to, arrow.arrived_ns.max(to.start_ns))];
        events.extend(ends.map(|(phase, span, at)| {
            json!({
                "ph": phase, "id": id, "pid": span.place.rank.0, "tid": track(span), "ts": micro(at),
                "name": format!("{:?}", arrow.kind).to_lowercase(), "cat": "flow", "bp": "e",
            })
        }));
    }
    json!({"displayTimeUnit": "ns", "traceEvents": events}).to_string()
}

fn name(rank: Rank, track: u32, what: &str, name: String) -> Value {
    json!({"ph": "M", "pid": rank.0, "tid": track, "name": what, "args": {"name": name}})
}

fn track(span: &Span) -> u32 {
    match span.lane {
        Lane::Block => span.place.threadblock.0,
        Lane::CopyEngine(_) => COPY_ENGINE,
        Lane::Nic(_) => NIC,
    }
}

fn micro(ns: f64) -> f64 {
    ns.round() / 1e3
}
