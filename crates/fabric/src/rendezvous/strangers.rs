//! The processes that rank 0 turns away, which its time-out tells.

use std::collections::BTreeSet;

use super::connection::Connection;

/// How many processes rank 0 turned away, by the reason. Displayed as the end of a sentence, empty if there were none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TurnedAway {
    /// Processes of this user that could not prove the secret.
    pub wrong_secret: u32,
    /// Processes of other users.
    pub other_users: u32,
}

impl std::fmt::Display for TurnedAway {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let reasons = [(self.wrong_secret, "with a wrong secret"), (self.other_users, "of another user")];
        let mut before = "; turned away: ";
        for (count, reason) in reasons.into_iter().filter(|(count, _)| *count > 0) {
            let noun = if count == 1 { "process" } else { "processes" };
            write!(f, "{before}{count} {noun} {reason}")?;
            before = ", ";
        }
        Ok(())
    }
}

/// Their numbers, so that a process that tries again counts once. Those whose number cannot be seen count as one.
#[derive(Default)]
pub(super) struct Strangers {
    wrong_secret: BTreeSet<i32>,
    other_users: BTreeSet<i32>,
}

impl Strangers {
    pub(super) fn without_the_secret(&mut self, connection: &Connection) {
        self.wrong_secret.insert(connection.other_process());
    }

    pub(super) fn of_another_user(&mut self, connection: &Connection) {
        self.other_users.insert(connection.other_process());
    }

    pub(super) fn turned_away(&self) -> TurnedAway {
        TurnedAway {
            wrong_secret: self.wrong_secret.len() as u32,
            other_users: self.other_users.len() as u32,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_sentence() {
        let told = |wrong_secret, other_users| TurnedAway { wrong_secret, other_users }.to_string();
        assert_eq!(told(0, 0), "");
        assert_eq!(told(1, 0), "; turned away: 1 process with a wrong secret");
        assert_eq!(told(2, 1), "; turned away: 2 processes with a wrong secret, 1 process of another user");
    }
}
