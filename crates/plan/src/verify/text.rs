//! Findings in words.

use std::fmt;
use std::ops::Range;

use super::finding::{Finding, Hazard, Kind, Missing, Mistake, Region, Served, Severity};
use super::program::Counted;
use crate::op::{BufferType, ChannelType};
use crate::plan::Origin;
use crate::text::escaped;

/// Most takes of a run that are listed.
const SERVED: usize = 24;

impl fmt::Display for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.buffer {
            BufferType::Input => "input",
            BufferType::Output => "output",
            BufferType::Scratch => "scratch",
        };
        let packets = if self.packets { " (packets)" } else { "" };
        let Range { start, end } = self.chunks;
        write!(f, "chunks {start} to {end} of rank {}'s {name}{packets}", self.rank)
    }
}

impl fmt::Display for Counted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Counted::Channel { rank, channel_type, channel } => {
                let name = if *channel_type == ChannelType::Port { "port" } else { "memory" };
                write!(f, "{name} channel {channel} of rank {rank}")
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
                write!(f, "not decided, and so rejected: more than {limit} {what}")
            }
            Kind::Operation { why } => write!(f, "impossible operation: {why}"),
            Kind::Bounds { chunks, rank, buffer, have } => write!(
                f,
                "out of bounds: chunks {} to {} of rank {rank}'s {buffer:?}, which has {have}",
                chunks.start, chunks.end
            ),
            Kind::NoCounterpart { channel_type, channel, peer } => write!(
                f,
                "{channel_type:?} channel {channel} has no counterpart: rank {peer} has fewer channels back"
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
            Kind::InputOverwritten { region } => write!(f, "overwrites the input, out of place: {region}"),
            Kind::Group { region, size, present } => {
                write!(f, "only {present} of a group of {size} thread blocks write their share: {region}")
            }
            Kind::UnusedScratch { rank, unused, chunks } => {
                write!(f, "{unused} of rank {rank}'s {chunks} chunks of scratch are not used")
            }
            Kind::UnusedChannel { rank, channel_type, channel } => {
                write!(f, "{channel_type:?} channel {channel} of rank {rank} is not used")
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
        for (place, origin) in self.places.iter().zip(&self.origins) {
            write!(f, "\n    {place}")?;
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
