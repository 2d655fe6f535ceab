//! One suite for every engine: what [`Engine`](antiphon_fabric::engine::Engine) promises. `suite` has the promises, `pad` the memory
//! of a receiver; `twin` and `ucx` have what only these engines do.

mod pad;
mod suite;
mod twin;
mod ucx;

use antiphon_fabric::engine::Engine;

/// Makes `peers` engines for the suite to test, which are not connected yet; `None` if the machine lacks what they need.
type Engines = fn(peers: usize) -> Option<Vec<Box<dyn Engine>>>;

/// The tests of the suite for one kind of engine.
macro_rules! engine {
    ($name:ident, $engines:expr) => {
        mod $name {
            use crate::suite;

            crate::engine!(@each $engines; data_is_there_before_its_signal, messages_of_four_peers_arrive_once,
                empty_and_large_payloads_arrive, places_outside_of_the_senders_region_are_dropped,
                messages_with_another_key_are_dropped, nothing_moves_before_the_inbox_is_open,
                a_buffer_is_free_when_its_flight_is_complete, a_peer_that_leaves_is_lost_after_what_it_sent,
                mistakes_are_named, a_receiver_that_was_removed_gets_nothing, a_thread_moves_messages_while_nobody_polls, living_peers_are_never_unreachable);
        }
    };
    (@each $engines:expr; $($test:ident),*) => {
        $(#[test]
        fn $test() {
            suite::$test($engines);
        })*
    };
}
pub(crate) use engine;

engine!(of_twins, crate::twin::engines);
engine!(of_ucx_by_tcp, crate::ucx::tcp);
engine!(of_ucx_by_shared_memory, crate::ucx::shared_memory);
