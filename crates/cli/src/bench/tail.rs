//! `--tail`: shows how long calls take when the ranks do not start together, and how long at worst.

use std::{
    fs::File,
    io::{self, Write},
};

use antiphon_bench::{
    Quantiles, TAIL_CALLS as CALLS, TAIL_DTYPE as DTYPE, TAIL_HIDDEN as HIDDEN, TailRow as Row,
};
use serde::Serialize;

use crate::{
    ExitStatus, SUCCESS,
    launch::{Launch, Stream},
    report::Machine,
};

/// The content of the file.
#[derive(Serialize)]
struct Report<'a> {
    machine: &'a Machine,
    calls: u32,
    hidden: usize,
    rows: Vec<Row>,
}

const HEADER: &str = "operation                    rows  skew beside |  ours p50      p99    p99.9      max |  NCCL p50      p99    p99.9      max | replays";

fn line(row: &Row) -> String {
    let quantiles = |q: &Quantiles| format!("{:9.1}{:9.1}{:9.1}{:9.1}", q.p50, q.p99, q.p999, q.max);
    format!(
        "{:26}{:7}{:6} {:6} | {} | {} | {:7}",
        row.operation,
        row.rows,
        row.skew_us,
        if row.beside_gemm { "gemm" } else { "" },
        quantiles(&row.ours),
        row.nccl.as_ref().map_or_else(|| format!("{:36}", "-"), quantiles),
        row.replays
    )
}

/// The command: it starts the ranks and shows their rows.
pub(super) fn measure(
    launch: Launch,
    machine: &Machine,
    json: Option<File>,
) -> Result<ExitStatus, Box<dyn std::error::Error>> {
    println!("microseconds beyond the skew of graphs of {CALLS} calls, {DTYPE}, rows of {HIDDEN}\n{HEADER}");
    let mut rows: Vec<Row> = Vec::new();
    let outcome = launch.run(|rank, stream, text| {
        match serde_json::from_slice(text) {
            Ok(row) if rank == 0 && stream == Stream::Stdout => {
                writeln!(io::stdout(), "{}", line(&row))?;
                rows.push(row);
            }
            _ => io::stderr().write_all(&[format!("[{rank}] ").as_bytes(), text].concat())?,
        }
        Ok(())
    })?;
    if !outcome.success() {
        eprint!("{}", outcome.report());
        return Ok(outcome.exit_code());
    }
    if let Some(file) = json {
        file.set_len(0)?;
        serde_json::to_writer_pretty(file, &Report { machine, calls: CALLS, hidden: HIDDEN, rows })?;
    }
    Ok(SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_stand_under_their_header() {
        let ours = Quantiles { p50: 23.4, p99: 25.0, p999: 26.0, max: 1234.5 };
        let row = Row {
            operation: "reduce_scatter_all_reduce".into(),
            rows: 2048,
            skew_us: 5000,
            beside_gemm: true,
            replays: 2000,
            ours,
            nccl: None,
        };
        for row in [Row { nccl: Some(ours), ..row.clone() }, row] {
            let (line, header) = (line(&row), HEADER);
            let bars = |text: &str| text.match_indices('|').map(|(at, _)| at).collect::<Vec<_>>();
            assert_eq!(bars(&line), bars(header), "{line}\n{header}");
        }
    }
}
