//! Reads of packets that may find plain data.
//!
//! A reader polls a packet's flag until it equals the number of the launch. Plain data come from the caller, so they may
//! equal this number. So no run may have a moment at which a reader polls bytes that hold plain data: neither data that the
//! plan wrote there in this launch, before the packets, nor data that it left there in the launch before. A read is safe if the
//! packets are known to have arrived when the reader begins to poll, or if packets of the launch before lie there until then.

use std::collections::{BTreeMap, HashMap};

use super::cells::Cells;
use super::finding::{Finding, Kind, Mistake};
use super::order::{Orders, Timelines};
use super::program::{Location, Program, What};
use super::runs::{Content, Goal, Runs, Stalled};
use super::schedule::Schedule;

/// The writer of a cell: timeline, level and number of the piece.
type Writer = (u32, u32, u32);

/// Waits that plain data may end. `left` are the cells of packets in which a run may leave plain data, and the steps that
/// wrote these. All else that two may do at a time has been looked for, and has not been found.
///
/// # Errors
/// [`Kind::TooLarge`]
pub(super) fn find(
    program: &Program<'_>,
    cells: &Cells,
    schedule: &Schedule,
    orders: &Orders,
    runs: &Runs<'_, '_>,
    left: &BTreeMap<u32, u32>,
    limit: usize,
) -> Result<Vec<Finding>, Kind> {
    let mut found = Vec::new();
    let (packets, plain) = writers(program, cells, schedule, orders);
    let lines = Timelines::new(program);
    each_piece(program, schedule, |_, step, at, piece| {
        let each = &program.moves[at as usize];
        for source in program.sources(each).iter().filter(|source| each.awaits && source.view.packets()) {
            let cell = source.cell + piece;
            let shared = cells.shared(source.view, cell);
            if found.len() >= limit || !shared.clone().any(|cell| plain.contains_key(&cell)) {
                continue;
            }
            let known = &orders.data.start[at as usize];
            let writers = &packets[&cell];
            let sure = |&&(timeline, level, piece): &&Writer| {
                known.reaches(timeline, level) || known.reaches(lines.piece(piece), 1)
            };
            if writers.iter().find(sure).is_some() {
                continue;
            }
            let reader = each.first_piece + piece;
            let stalled = |writer, strict| Stalled {
                pieces: [Some(reader), Some(writer)],
                polls: [true, false],
                cell: Some((cell, shared.start, shared.end)),
                strict,
                passes_packets: strict && orders.packets_alone(),
                ..Stalled::default()
            };
            let goal = Goal::Mistaken(left.contains_key(&cell));
            for &(.., writer) in writers {
                let mut state = runs.find(stalled(writer, false), goal)?;
                if state.is_none() && orders.relaxed() {
                    state = runs.find(stalled(writer, true), goal)?;
                }
                let Some(state) = state else { continue };
                let (mistake, writer) = match state.content {
                    Content::Data(step) => (Mistake::DataForPackets, step),
                    _ => (Mistake::LaunchBefore, left[&cell]),
                };
                let places = [step, writer].map(|step| program.steps[step as usize].place);
                let kind = Kind::MixedScratch { region: cells.region(cell), mistake };
                found.push(Finding::new(program.plan, kind, places.to_vec()).in_run(state.served));
                break;
            }
        }
        Ok(())
    })?;
    Ok(found)
}

/// All pieces: agent, step, move and which of it.
fn each_piece(
    program: &Program<'_>,
    schedule: &Schedule,
    mut each: impl FnMut(u32, u32, u32, u32) -> Result<(), Kind>,
) -> Result<(), Kind> {
    for &(agent, step) in schedule {
        if let What::Move(moves) | What::Push { moves, .. } = &program.steps[step as usize].what {
            for at in moves.clone() {
                (0..program.moves[at as usize].pieces).try_for_each(|piece| each(agent, step, at, piece))?;
            }
        }
    }
    Ok(())
}

/// For each cell of packets and of plain data that shares bytes with one of the other kind, its writer.
fn writers(
    program: &Program<'_>,
    cells: &Cells,
    schedule: &Schedule,
    orders: &Orders,
) -> (HashMap<u32, Vec<Writer>>, HashMap<u32, Vec<Writer>>) {
    let (mut packets, mut plain) = (HashMap::new(), HashMap::new());
    let lines = Timelines::new(program);
    let all = each_piece(program, schedule, |agent, _, at, piece| {
        let each = &program.moves[at as usize];
        let timeline = each.port.map_or(agent, |port| lines.port(port));
        let writer = (timeline, orders.data.level[at as usize], each.first_piece + piece);
        for &Location { view, cell, .. } in program.dests(each) {
            if !cells.shared(view, cell + piece).is_empty() {
                let writers = if view.packets() { &mut packets } else { &mut plain };
                let writers: &mut Vec<Writer> = writers.entry(cell + piece).or_default();
                writers.push(writer);
            }
        }
        Ok(())
    });
    all.expect("nothing of it fails");
    (packets, plain)
}
