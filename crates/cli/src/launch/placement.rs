//! The cores on which each rank runs.

use std::io;

use rustix::thread::{CpuSet, sched_getaffinity};

use crate::machine::Files;

/// An equal share for each rank of the cores that this process may use: neighbours, so that a rank's threads
/// share caches and a node's memory. With more ranks than cores, one core each, in turn.
pub(super) fn shares(ranks: usize) -> io::Result<Vec<CpuSet>> {
    let allowed = sched_getaffinity(None)?;
    let mut cores: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&core| allowed.is_set(core)).collect();
    let files = Files::system();
    cores.sort_by_cached_key(|&core| Position::read(&files, core));
    Ok((0..ranks).map(|rank| set(share(&cores, rank, ranks))).collect())
}

fn share(cores: &[usize], rank: usize, ranks: usize) -> &[usize] {
    let count = cores.len();
    if count < ranks {
        let core = rank % count;
        return &cores[core..=core];
    }
    &cores[rank * count / ranks..(rank + 1) * count / ranks]
}

fn set(cores: &[usize]) -> CpuSet {
    let mut set = CpuSet::new();
    cores.iter().for_each(|&core| set.set(core));
    set
}

/// Orders cores by where they are: package, die, core, then the thread on it. Numbers alone will not do, as
/// many machines count the first thread of every core before any second thread.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Position([u32; 3], usize);

impl Position {
    fn read(files: &Files, core: usize) -> Self {
        let number = |name| {
            let text = files.read(format!("sys/devices/system/cpu/cpu{core}/topology/{name}"));
            text.and_then(|text| text.parse().ok()).unwrap_or(0)
        };
        Self([number("physical_package_id"), number("die_id"), number("core_id")], core)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_cover_all_cores_without_overlap() {
        let cores: Vec<usize> = (0..10).collect();
        let shares: Vec<&[usize]> = (0..4).map(|rank| share(&cores, rank, 4)).collect();
        assert_eq!(shares.concat(), cores);
        assert!(shares.iter().all(|share| (2..=3).contains(&share.len())));
    }

    #[test]
    fn more_ranks_than_cores_take_turns() {
        let shares: Vec<&[usize]> = (0..5).map(|rank| share(&[4, 6], rank, 5)).collect();
        assert_eq!(shares, [[4], [6], [4], [6], [4]]);
    }

    #[test]
    fn threads_of_one_core_are_neighbours() {
        let folder = tempfile::tempdir().unwrap();
        for (cpu, core) in [(0, 0), (1, 1), (2, 0), (3, 1)] {
            let topology = folder.path().join(format!("sys/devices/system/cpu/cpu{cpu}/topology"));
            std::fs::create_dir_all(&topology).unwrap();
            std::fs::write(topology.join("core_id"), format!("{core}\n")).unwrap();
        }
        let files = Files::at(folder.path());
        let mut cpus = vec![0, 1, 2, 3];
        cpus.sort_by_cached_key(|&cpu| Position::read(&files, cpu));
        assert_eq!(cpus, [0, 2, 1, 3]);
    }
}
