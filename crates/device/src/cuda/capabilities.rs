//! The ways in which a device can share memory with peers, each tried with a small allocation.

use std::os::fd::AsFd;

use serde::{Deserialize, Serialize};

use super::{
    Allocation, Context, CudaError, Device, DeviceMemory, DevicePointer, IpcExport, Mapping, memory,
    vmm::{FABRIC, POSIX_FD, PRIVATE},
};

/// Whether something works, and how that is known.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "answer", content = "how", rename_all = "lowercase")]
pub enum Answer {
    /// It was tried and works; what was tried.
    Yes(String),
    /// It does not work; the text of the error.
    No(String),
    /// Not tried; the reason, and what is known nevertheless.
    Untested(String),
}

/// The ways in which a device's memory can reach peers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Capabilities {
    /// Memory that is created and mapped separately (VMM).
    pub virtual_memory: Answer,
    /// Such memory handed over as a file descriptor.
    pub posix_fd: Answer,
    /// Memory of cuMemAlloc handed over to another process (CUDA IPC).
    pub ipc: Answer,
    /// Memory handed over to other machines of one NVLink domain.
    pub fabric: Answer,
    /// NVLink multicast. Never tried: its objects belong to the switches, which other programs share.
    pub multicast: Answer,
}

impl Capabilities {
    /// Tries everything on a device but multicast, and leaves nothing behind. Takes a context on the device, which is
    /// a few hundred milliseconds where this process has none yet; a device whose context cannot be had is untested.
    ///
    /// # Errors
    /// [`CudaError::Call`] when the device does not even tell its attributes.
    pub fn probe(device: Device) -> Result<Self, CudaError> {
        let properties = device.properties()?;
        let multicast = multicast(properties.multicast);
        let context = match Context::primary(device) {
            Ok(context) => context,
            Err(error) => return Ok(Self { multicast, ..Self::untested(&format!("no context: {error}")) }),
        };
        Ok(Self {
            virtual_memory: tried(
                properties.virtual_memory,
                || two_ends(&context, false),
                "created, mapped, written and read",
            ),
            posix_fd: tried(
                properties.virtual_memory && properties.posix_fd_handles,
                || two_ends(&context, true),
                "exported, imported, mapped twice, written and read",
            ),
            ipc: tried(
                true,
                || export_ipc(&context),
                "a handle was exported; only another process could open it",
            ),
            fabric: tried(
                properties.fabric_handles,
                || export_fabric(&context),
                "a handle was exported; only this machine was asked",
            ),
            multicast,
        })
    }

    /// Nothing was tried, for this reason.
    pub fn untested(why: &str) -> Self {
        let [virtual_memory, posix_fd, ipc, fabric, multicast] =
            std::array::from_fn(|_| Answer::Untested(why.to_owned()));
        Self { virtual_memory, posix_fd, ipc, fabric, multicast }
    }
}

fn multicast(attribute: bool) -> Answer {
    match attribute {
        true => Answer::Untested("attribute says supported".into()),
        false => Answer::No("attribute says not supported".into()),
    }
}

/// The answer of an attempt, which says whether it saw what it should have seen.
fn tried(attribute: bool, attempt: impl FnOnce() -> Result<bool, CudaError>, what: &str) -> Answer {
    if !attribute {
        return Answer::No("attribute says not supported".into());
    }
    match attempt() {
        Ok(true) => Answer::Yes(what.to_owned()),
        Ok(false) => Answer::No("other bytes were read than had been written".into()),
        // A full device says nothing about what it can do.
        Err(error) if error.is_out_of_memory() => Answer::Untested(error.to_string()),
        Err(error) => Answer::No(error.to_string()),
    }
}

/// What is written at one end of a mapping must be seen at the other: of the same mapping, or of one that a
/// descriptor brought.
fn two_ends(context: &Context, by_descriptor: bool) -> Result<bool, CudaError> {
    let way = if by_descriptor { POSIX_FD } else { PRIVATE };
    let allocation = Allocation::create_for(context, 1, way)?;
    let len = allocation.len();
    let imported = match by_descriptor {
        true => Some(Allocation::import(context, allocation.export()?.as_fd(), len)?),
        false => None,
    };
    let map = |allocation: Allocation| allocation.map(&[context.device()]);
    let (here, there) = (map(allocation)?, imported.map(map).transpose()?);
    let seen = there.as_ref().map_or(here.pointer(), Mapping::pointer);
    write_and_read(context, here.pointer(), seen)
}

fn write_and_read(context: &Context, to: DevicePointer, from: DevicePointer) -> Result<bool, CudaError> {
    const PATTERN: u8 = 0xA5;
    let (stream, mut bytes) = (context.stream()?, [0; 16]);
    // SAFETY: both are addresses of mappings of at least 2 MiB that outlive this function, as `bytes` does the wait.
    unsafe {
        memory::fill(stream.borrow(), to, PATTERN, bytes.len())?;
        memory::copy_to_host(stream.borrow(), bytes.as_mut_ptr(), from, bytes.len())?;
    }
    stream.borrow().synchronize()?;
    Ok(bytes == [PATTERN; 16])
}

fn export_ipc(context: &Context) -> Result<bool, CudaError> {
    let memory = DeviceMemory::allocate(context, 1 << 12)?;
    IpcExport::of(context, memory.pointer()).map(|_| true)
}

fn export_fabric(context: &Context) -> Result<bool, CudaError> {
    Allocation::create_for(context, 1, FABRIC)?.try_export_fabric().map(|()| true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_attribute_may_refuse_but_only_an_attempt_says_yes() {
        let refused = Answer::No("attribute says not supported".into());
        assert_eq!(tried(false, || unreachable!("not even tried"), "what"), refused);
        assert_eq!(tried(true, || Ok(true), "what"), Answer::Yes("what".into()));
        assert!(
            matches!(tried(true, || Ok(false), "what"), Answer::No(why) if why.starts_with("other bytes"))
        );
        let failed = CudaError::Unsupported { device: 0, what: "anything" };
        assert_eq!(tried(true, || Err(failed.clone()), "what"), Answer::No(failed.to_string()));
    }

    #[test]
    fn a_full_device_says_nothing() {
        let error = || CudaError::Call { function: "cuMemCreate", code: 2, name: "full", text: "no memory" };
        let answer = tried(true, || Err(error()), "what");
        assert_eq!(answer, Answer::Untested("cuMemCreate failed: full (2): no memory".into()));
    }

    #[test]
    fn multicast_is_never_more_than_what_its_attribute_says() {
        assert_eq!(multicast(true), Answer::Untested("attribute says supported".into()));
        assert!(matches!(multicast(false), Answer::No(_)));
    }

    #[test]
    fn an_answer_is_two_words_in_json() {
        let json = |answer: Answer| serde_json::to_string(&answer).unwrap();
        assert_eq!(json(Answer::Untested("why".into())), r#"{"answer":"untested","how":"why"}"#);
    }
}
