//! Send and receive: every rank sends to the next one, as the stages of a pipeline-parallel model do, and gets what the one
//! before it sends. Not in place, since what is to be sent would be overwritten.

use super::Setting;
use super::channels::{BLOCK, Ring};
use crate::{Collective, DataSync, Program, Result};

/// Every rank writes its input to the next one's output.
///
/// When the next rank has begun, S bytes go there, and a signal behind them.
///
/// # Errors
/// As [`Algorithm::program`](super::Algorithm::program).
pub fn shift(setting: &Setting) -> Result<Program> {
    let program = setting.program("send-recv", |n| Collective::send_recv(n, 1))?;
    let n = setting.ranks;
    let ring = Ring::of_memory(&program)?;
    for own in 0..n {
        let there = program.rank((own + 1) % n)?.output().chunk(0)?;
        ring.begin(own)?;
        ring.next(own).put(there, program.rank(own)?.input().chunk(0)?, BLOCK)?;
        ring.send(own)?;
        ring.receive(own)?;
    }
    Ok(program)
}

/// The same through ports: an engine moves the bytes, between nodes as well, and the thread block only waits.
///
/// # Errors
/// As [`Algorithm::program`](super::Algorithm::program).
pub fn port_shift(setting: &Setting) -> Result<Program> {
    let program = setting.program("port-send-recv", |n| Collective::send_recv(n, 1))?;
    let n = setting.ranks;
    let ring = Ring::of_ports(&program)?;
    for own in 0..n {
        let there = program.rank((own + 1) % n)?.output().chunk(0)?;
        ring.previous(own).signal(BLOCK, DataSync::NONE)?;
        ring.next(own).wait(BLOCK, DataSync::AFTER)?;
        ring.next(own).put_with_signal_and_flush(there, program.rank(own)?.input().chunk(0)?, BLOCK)?;
        ring.previous(own).wait(BLOCK, DataSync::AFTER)?;
    }
    Ok(program)
}
