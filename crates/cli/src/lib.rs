//! The parts of the command `antiphon`, as a library so that tests and other commands can reach them.
//!
//! * [`launch`] starts a program on every rank and watches over it; [`run`] is the command around it.
//! * [`mod@bench`] verifies and times collectives; [`tune`] finds out which algorithm is fastest at which size.
//! * [`doctor`] says what this machine can do and what it lacks.
//! * [`report`] shows measured rows as a table, a JSON file and a plot.
//! * [`sizes`] reads message sizes such as `1K..64M`.
//! * [`machine`] reads what Linux tells about the machine.

pub mod bench;
pub mod doctor;
pub mod launch;
pub mod machine;
pub mod report;
pub mod run;
pub mod sizes;
pub mod tune;
