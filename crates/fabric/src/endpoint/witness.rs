//! The report of a waiting rank.

use std::time::Duration;

use antiphon_device::host::process;

use crate::{Members, Signature, layout::Regions};

/// A rank that was asked for a report, and its view of the others.
pub(crate) struct Witness<'a> {
    pub(crate) rank: usize,
    pub(crate) members: &'a Members,
    pub(crate) regions: &'a Regions,
    /// The process of a rank, if it has a number here.
    pub(crate) pid: &'a dyn Fn(usize) -> Option<u32>,
}

impl Witness<'_> {
    /// The report: one line for the rank itself, and one for each rank that it waits for.
    pub(crate) fn tell(&self, operation: Signature, missing: &[usize], waited: Duration) -> String {
        let all = self.regions.layout().world_size;
        let mut text = format!(
            "antiphon: {} {operation} waits since {waited:.1?} for {}\n",
            self.name(self.rank),
            self.members.names(missing, all)
        );
        for &rank in missing {
            text += &format!("antiphon:   {} {}\n", self.name(rank), self.activity(rank));
        }
        text
    }

    fn name(&self, rank: usize) -> String {
        let process = (self.pid)(rank).map_or(String::new(), |pid| format!(" (process {pid})"));
        format!("{}{process}", self.members.name(rank))
    }

    fn activity(&self, rank: usize) -> String {
        if self.regions.is_elsewhere(rank) {
            return "is on another node".to_owned();
        }
        let process = (self.pid)(rank).and_then(process::activity);
        if let Some(stopped) = process.filter(|doing| doing.contains("stopped") || doing.contains("ended")) {
            return stopped.to_owned();
        }
        match (self.regions.control(rank).wait.0.current(), process) {
            (Some((operation, waited)), _) => format!("waits in {operation} since {waited:.1?}"),
            (None, Some(doing)) => format!("does not wait in this communicator: its process {doing}"),
            (None, None) => "does not wait in this communicator".to_owned(),
        }
    }
}
