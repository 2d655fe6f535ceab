//! A plan laid out for one rank, for whatever executes it: where the bytes of its buffers lie, and its operations as steps.
//!
//! Both backends execute the same [`Program`], so a reduction takes its sources in the same order on both, and has the same
//! bits.

mod checked;
mod compile;
mod placement;
mod program;
mod slicing;
mod usage;

pub(crate) use checked::{Checked, Mode, channels};
pub(crate) use compile::{Target, compile};
#[cfg(test)]
pub(crate) use placement::Placements;
pub(crate) use placement::{Base, Move};
pub(crate) use program::{Frame, Layout, Operand, Program, Reduction, Request, Signal, Step, Work, slot};
pub(crate) use slicing::{Slicing, most_proved, unit};

/// What does the work of a plan's ports between GPUs. The bits of the results are the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Ports {
    /// The thread blocks, by stores.
    #[default]
    Blocks,
    /// The GPUs' copy engines. Blocks push requests, and a thread of the host hands them on; so each takes some microseconds more, and no
    /// multiprocessor copies. Packets are stored by the blocks in any case.
    Engines,
}

impl Ports {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Blocks, Self::Engines];

    /// Its name: `blocks` or `engines`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Blocks => "blocks",
            Self::Engines => "engines",
        }
    }
}

/// How much a packet carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[repr(u8)]
pub enum PacketKind {
    /// 4 bytes of data in 8.
    LL8 = 8,
    /// 8 bytes of data in 16.
    #[default]
    LL16 = 16,
}

impl PacketKind {
    /// All forms.
    pub const ALL: [Self; 2] = [Self::LL8, Self::LL16];

    /// Its name: `ll8` or `ll16`.
    pub fn name(self) -> &'static str {
        match self {
            Self::LL8 => "ll8",
            Self::LL16 => "ll16",
        }
    }

    /// Bytes of data in a packet.
    pub fn payload(self) -> usize {
        self as usize / 2
    }
}
