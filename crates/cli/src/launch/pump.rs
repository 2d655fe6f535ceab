//! Reads what the ranks write and hands it on line by line.

use std::io::{self, PipeReader, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::Stream;
use super::lines::Lines;

/// How long to read on after the last rank has ended: a `tee` behind a rank needs a moment, while a daemon
/// that a rank left behind may hold the pipe for ever.
const LINGER: Duration = Duration::from_secs(1);

const READ: usize = 64 << 10;

/// One output of one rank.
pub(super) struct Source {
    rank: usize,
    stream: Stream,
    pipe: PipeReader,
    lines: Lines,
}

impl Source {
    pub(super) fn new(rank: usize, stream: Stream, pipe: OwnedFd) -> Self {
        Self { rank, stream, pipe: PipeReader::from(pipe), lines: Lines::default() }
    }

    /// Reads once. False when there is nothing more to come, or no reader is left: `unwritten` then has the reason.
    fn advance<F>(
        &mut self,
        buffer: &mut [u8],
        output: &mut F,
        unwritten: &mut Option<io::Error>,
    ) -> io::Result<bool>
    where
        F: FnMut(usize, Stream, &[u8]) -> io::Result<()>,
    {
        let read = match self.pipe.read(buffer) {
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(true),
            Err(error) => return Err(error),
        };
        let emit = |line: &[u8]| output(self.rank, self.stream, line);
        let taken = if read == 0 { self.lines.finish(emit) } else { self.lines.push(&buffer[..read], emit) };
        let open = read != 0 && taken.is_ok();
        *unwritten = unwritten.take().or(taken.err());
        Ok(open)
    }
}

/// Reads all outputs until they end, or until [`LINGER`] after `closing` does.
pub(super) struct Pump {
    sources: Vec<Source>,
    /// Ends (its writer is dropped) when every rank has ended. `None` once that was seen.
    closing: Option<PipeReader>,
    deadline: Option<Instant>,
    /// The first error of what takes the lines.
    unwritten: Option<io::Error>,
}

impl Pump {
    pub(super) fn new(sources: Vec<Source>, closing: PipeReader) -> Self {
        Self { sources, closing: Some(closing), deadline: None, unwritten: None }
    }

    /// Returns the first error of `output`, which does not keep other outputs from being read.
    pub(super) fn run<F>(mut self, mut output: F) -> io::Result<Option<io::Error>>
    where
        F: FnMut(usize, Stream, &[u8]) -> io::Result<()>,
    {
        let mut buffer = vec![0; READ];
        while !self.sources.is_empty() && self.deadline.is_none_or(|deadline| Instant::now() < deadline) {
            let ready = self.wait()?;
            let mut position = 0;
            let mut failure = None;
            self.sources.retain_mut(|source| {
                position += 1;
                !ready[position - 1]
                    || source.advance(&mut buffer, &mut output, &mut self.unwritten).unwrap_or_else(|error| {
                        failure = Some(error);
                        false
                    })
            });
            if let Some(error) = failure {
                return Err(error);
            }
        }
        self.flush(&mut output);
        Ok(self.unwritten)
    }

    /// Waits until something can be read and says, for each source, whether it can.
    fn wait(&mut self) -> io::Result<Vec<bool>> {
        let pipes = self.sources.iter().map(|source| source.pipe.as_fd());
        let closing = self.closing.iter().map(|pipe| pipe.as_fd());
        let mut polled: Vec<_> = pipes.chain(closing).map(readable).collect();
        let timeout = self.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let timeout = timeout.map(|left| Timespec::try_from(left).expect("at most the linger time"));
        match poll(&mut polled, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let mut ready: Vec<bool> = polled.iter().map(|polled| !polled.revents().is_empty()).collect();
        if self.closing.is_some() && ready.pop() == Some(true) {
            self.closing = None;
            self.deadline = Some(Instant::now() + LINGER);
        }
        Ok(ready)
    }

    /// The beginnings of lines whose end did not come in time.
    fn flush<F>(&mut self, output: &mut F)
    where
        F: FnMut(usize, Stream, &[u8]) -> io::Result<()>,
    {
        for source in &mut self.sources {
            let finished = source.lines.finish(|line| output(source.rank, source.stream, line));
            self.unwritten = self.unwritten.take().or(finished.err());
        }
    }
}

fn readable(pipe: BorrowedFd<'_>) -> PollFd<'_> {
    PollFd::from_borrowed_fd(pipe, PollFlags::IN)
}
