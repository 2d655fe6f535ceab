//! Cuts a stream of bytes into lines.

use std::io;

use super::MAX_LINE;

/// Holds the beginning of a line until its end arrives.
#[derive(Debug, Default)]
pub(super) struct Lines {
    partial: Vec<u8>,
}

impl Lines {
    /// Takes what was read and hands on each line that is now whole, with its newline.
    pub(super) fn push(
        &mut self,
        read: &[u8],
        mut emit: impl FnMut(&[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        for piece in read.split_inclusive(|&byte| byte == b'\n') {
            if self.partial.is_empty() && piece.ends_with(b"\n") {
                emit(piece)?;
                continue;
            }
            self.partial.extend_from_slice(piece);
            if piece.ends_with(b"\n") || self.partial.len() >= MAX_LINE {
                emit(&self.partial)?;
                self.partial.clear();
            }
        }
        Ok(())
    }

    /// Hands on a last line that has no newline.
    pub(super) fn finish(&mut self, mut emit: impl FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> {
        if self.partial.is_empty() {
            return Ok(());
        }
        emit(&std::mem::take(&mut self.partial))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn cut(reads: &[&[u8]]) -> Vec<Vec<u8>> {
        let mut lines = Lines::default();
        let mut seen = Vec::new();
        let mut emit = |line: &[u8]| {
            seen.push(line.to_vec());
            Ok(())
        };
        for read in reads {
            lines.push(read, &mut emit).unwrap();
        }
        lines.finish(&mut emit).unwrap();
        seen
    }

    #[test]
    fn lines_are_joined_over_reads() {
        assert_eq!(cut(&[b"one\ntw", b"o\n", b"\nlast"]), [&b"one\n"[..], b"two\n", b"\n", b"last"]);
    }

    #[test]
    fn a_line_without_end_comes_in_bounded_pieces() {
        let read = vec![b'x'; 64 << 10];
        let pieces = cut(&vec![&read[..]; 40]);
        assert_eq!(pieces.concat().len(), 40 * read.len());
        assert!(pieces.len() > 1 && pieces.iter().all(|piece| piece.len() < MAX_LINE + read.len()));
    }

    proptest! {
        #[test]
        fn nothing_is_lost_and_lines_are_whole(
            reads in prop::collection::vec(prop::collection::vec(prop::sample::select(b"ab\n\xff".to_vec()), 0..20), 0..20),
        ) {
            let reads: Vec<&[u8]> = reads.iter().map(Vec::as_slice).collect();
            let seen = cut(&reads);
            prop_assert_eq!(seen.concat(), reads.concat());
            for line in seen.iter().rev().skip(1) {
                prop_assert_eq!(line.iter().position(|&byte| byte == b'\n'), Some(line.len() - 1));
            }
        }
    }
}
