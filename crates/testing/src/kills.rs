//! Ranks that are killed in the middle of their work.

use std::time::Duration;

use rustix::process::Signal;

use crate::world::{LIMIT, World};

/// World sizes, each with the rank that is killed.
pub const VICTIMS: [(usize, usize); 8] = [(2, 1), (3, 0), (4, 2), (4, 3), (2, 0), (3, 1), (3, 2), (4, 0)];

/// Kills each victim in the middle of `role`, and sees that the others soon get an error.
pub fn kill_each(victims: &[(usize, usize)], role: &str, longest_delay: Duration) {
    for (seed, &(world_size, victim)) in victims.iter().enumerate() {
        let world = World::start(world_size, role, seed % 2 == 0, LIMIT);
        world.assert_nameless(victim);
        // Any moment, but the same in every run.
        let moment = (seed as u32 + 1).wrapping_mul(0x9E37_79B1) >> 22;
        std::thread::sleep(longest_delay * moment / 1024);
        let killed = world.signal(victim, Signal::KILL);
        for rank in world.others(victim) {
            let (heard, said) = world.hear(rank);
            assert_eq!(said, format!("lost {victim}"), "rank {rank} of {world_size}, in {role}");
            let took = heard - killed;
            assert!(took < Duration::from_secs(1), "rank {rank} of {world_size} knew after {took:?}");
        }
        world.end(&[victim]);
    }
}
