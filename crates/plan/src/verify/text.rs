//! Findings in words.

use std::fmt;
use std::ops::Range;

use super::finding::{Finding, Hazard, Kind, Missing, Mistake, Region, Served, Severity};
use super::program::Counted;
use crate::ids::Rank;
use crate::op::{BufferType, ChannelType};
use crate::plan::Origin;
use crate::text::escaped;

/// Most takes of a run that are listed.
const SERVED: usize = 24;
/// Most ranges of scratch that are listed.
const UNUSED: usize = 8;

fn name(buffer: BufferType) -> &'static str {
    match buffer {
        BufferType::Input => "input",
        BufferType::Output => "output",
        BufferType::Scratch => "scratch",
    }
}

/// Numbers as a list, in which three or more in a row are a range: `1, 4..8`.
fn list(ranks: &[Rank]) -> String {
    let runs = ranks.chunk_by(|a, b| a.0 + 1 == b.0).map(|run| match run {
        [one] => one.to_string(),
        [one, next] => format!("{one}, {next}"),
        run => format!("{}..{}", run[0], run[run.len() - 1].0 + 1),
    });
    runs.collect::<Vec<_>>().join(", ")
}

/// Chunks of the scratch of ranks.
fn unused(chunks: &Range<u64>, ranks: &[Rank]) -> String {
    let ranks = if let [rank] = ranks { format!("rank {rank}") } else { format!("ranks {}", list(ranks)) };
    format!("chunks {}..{} of {ranks}", chunks.start, chunks.end)
}

impl fmt::Display for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = name(self.buffer);
        let packets = if self.packets { " (packets)" } else { "" };
        let Range { start, end } = self.chunks;
        write!(f, "chunks {start}..{end} of rank {}'s {name}{packets}", self.rank)
    }
}

fn channel_name(channel_type: ChannelType) -> &'static str {
    match channel_type {
        ChannelType::Memory => "memory channel",
        ChannelType::Port => "port channel",
        ChannelType::Switch => "switch channel",
    }
}

impl fmt::Display for Counted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Counted::Channel { rank, channel_type, channel } => {
                write!(f, "{} {channel} of rank {rank}", channel_name(*channel_type))
            }
            Counted::Semaphore { rank, semaphore } => write!(f, "semaphore {semaphore} of rank {rank}"),
        }
    }
}

impl fmt::Display for Served {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "thread block {} of rank {} from {}", self.block, self.rank, self.counter)
    }
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Missing::Count(counted @ Counted::Channel { .. }) => write!(f, "a signal on {counted}"),
            Missing::Count(counted) => write!(f, "a release of {counted}"),
            Missing::Barrier(barrier) => write!(f, "the other thread blocks at barrier {barrier}"),
            Missing::Packets => write!(f, "packets that have not been written"),
        }
    }
}

fn counts<T: fmt::Display>(of: &str, counts: &[(T, u32)]) -> String {
    let each: Vec<_> = counts.iter().map(|(who, times)| format!("{of} {who} {times}×")).collect();
    if each.is_empty() { "nobody".into() } else { each.join(", ") }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Kind::Form { error } => write!(f, "malformed: {error}"),
            Kind::NoSize { why } => write!(f, "no message fits the plan: {why}"),
            Kind::TooLarge { what, limit } => {
                write!(f, "not decided: more than {limit} {what}")
            }
            Kind::Operation { why } => write!(f, "impossible operation: {why}"),
            Kind::Bounds { chunks, rank, buffer, have } => write!(
                f,
                "out of bounds: chunks {}..{} of rank {rank}'s {}, which has {have}",
                chunks.start,
                chunks.end,
                name(*buffer)
            ),
            Kind::NoCounterpart { channel_type, channel, peer } => write!(
                f,
                "{} {channel} has no counterpart: rank {peer} has fewer channels back",
                channel_name(*channel_type)
            ),
            Kind::Barrier { barrier, expected, comes } => write!(
                f,
                "barrier {barrier} is for {expected} thread blocks, equally often; there come {}",
                counts("thread block", comes)
            ),
            Kind::Unbalanced { counter, added, taken } => write!(
                f,
                "unbalanced: a launch adds {added} to {counter} and takes {taken}; the next one would find another count"
            ),
            Kind::Deadlock { waits } => {
                let waits: Vec<_> = waits.iter().map(Missing::to_string).collect();
                write!(f, "deadlock: each waits for ever, for {}", waits.join("; for "))
            }
            Kind::Race { hazard, region } => {
                let what = match hazard {
                    Hazard::ReadAfterWrite => "the first writes what the second reads",
                    Hazard::WriteAfterRead => "the first reads what the second overwrites",
                    Hazard::WriteAfterWrite => "both write",
                };
                write!(f, "race: {what}, and nothing orders them: {region}")
            }
            Kind::OnlyAnnounced { hazard, region } => {
                let what = if *hazard == Hazard::WriteAfterWrite { "overwrites" } else { "reads" };
                write!(
                    f,
                    "only announced: the second {what} what the first writes, and only packets say that it is there, \
                     which carry nothing but themselves in device memory: {region}"
                )
            }
            Kind::Late { region, written } => write!(
                f,
                "{region} may still be {} when rank {} has ended",
                if *written { "written" } else { "read" },
                region.rank
            ),
            Kind::MixedScratch { region, mistake } => {
                let what = match mistake {
                    Mistake::PacketsForData => {
                        "the first reads as plain data the packets that the second wrote"
                    }
                    Mistake::DataForPackets => {
                        "the first takes for packets the plain data that the second wrote, which may equal their flag"
                    }
                    Mistake::LaunchBefore => {
                        "the first takes for packets the plain data that the second wrote in the launch before, which may \
                         equal their flag"
                    }
                };
                write!(f, "mixed scratch: {what}: {region}")
            }
            Kind::Unwritten { region } => write!(f, "reads what was never written: {region}"),
            Kind::Wrong { region, expected, found } => {
                write!(f, "wrong result: {region} must hold {expected}, and holds {found}")
            }
            Kind::Range { largest_chunk, why } => {
                write!(f, "nothing is known of chunks of more than {largest_chunk} bytes: {why}")
            }
            Kind::Unstarted { rank, owner } => write!(
                f,
                "rank {rank} uses buffers of rank {owner} without waiting for it to begin: the ranks must meet before each call"
            ),
            Kind::NeedsMeeting { why } => {
                write!(f, "the ranks must meet before each launch; in launches back to back: {why}")
            }
            Kind::SharedScratch => write!(f, "packets and plain data share bytes of scratch"),
            Kind::InputOverwritten { region } => write!(f, "overwrites the input, out of place: {region}"),
            Kind::Group { region, size, present } => {
                write!(f, "only {present} of a group of {size} thread blocks write their share: {region}")
            }
            Kind::UnusedScratch { chunks } => {
                let shown = chunks.iter().take(UNUSED).map(|(chunks, ranks)| unused(chunks, ranks));
                write!(f, "scratch that nobody uses: {}", shown.collect::<Vec<_>>().join("; "))?;
                match chunks.len().saturating_sub(UNUSED) {
                    0 => Ok(()),
                    more => write!(f, "; and {more} more ranges"),
                }
            }
            Kind::UnusedChannel { rank, channel_type, channel } => {
                write!(f, "{} {channel} of rank {rank} is not used", channel_name(*channel_type))
            }
            Kind::UnusedSemaphore { rank, semaphore } => {
                write!(f, "semaphore {semaphore} of rank {rank} is not used")
            }
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let severity = if self.severity() == Severity::Error { "error" } else { "warning" };
        write!(f, "{severity}: {}", self.kind)?;
        for ((place, operation), origin) in self.places.iter().zip(&self.operations).zip(&self.origins) {
            write!(f, "\n    {place}: {operation}")?;
            if let Some(Origin { file, line }) = origin {
                write!(f, " ({}:{line})", escaped(file))?;
            }
        }
        if !self.served.is_empty() {
            write!(f, "\n    if these take first, in this order: ")?;
            for (at, served) in self.served.iter().take(SERVED).enumerate() {
                write!(f, "{}{served}", if at > 0 { ", " } else { "" })?;
            }
            if self.served.len() > SERVED {
                write!(f, ", and {} more", self.served.len() - SERVED)?;
            }
        }
        Ok(())
    }
}
