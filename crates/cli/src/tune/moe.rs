//! `antiphon tune --moe`: measures how many multiprocessors dispatches and combines need.

use std::io::{Write, stdout};

use antiphon::{
    collectives::Communicator,
    moe::{MoeConfig, Movement, Multiprocessors},
    session::Session,
};

use super::Result;
use crate::{ExitStatus, SUCCESS, sizes::Sizes};

/// How mixtures of experts are measured.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Mixtures of experts")]
pub struct Experts {
    /// On cuda: measure how many multiprocessors dispatches and combines by token need, for calls that leave the number open (num_sms 0)
    #[arg(long)]
    pub moe: bool,

    /// The elements of a token, of bf16
    #[arg(long, default_value = "7168", requires = "moe")]
    hidden: usize,

    /// The least and the greatest number of tokens of a rank, from which numbers double
    #[arg(long, default_value = "16..4K", requires = "moe")]
    tokens: Sizes,
}

/// Measures on a rank, the first of which prints what was chosen.
pub(super) fn work(args: &Experts) -> Result<ExitStatus> {
    let comm = Communicator::from_env()?;
    let rank = comm.rank();
    let session = Session::new(comm);
    let [least, most] = [args.tokens.0.iter().min(), args.tokens.0.iter().max()]
        .map(|end| end.copied().unwrap_or_default() as usize);
    let moe = session.moe(MoeConfig { num_sms: 0, ..MoeConfig::for_gpus() });
    let chosen = moe.tune(rank as u32, args.hidden, least..=most)?;
    if rank == 0 {
        write!(stdout(), "{}", describe(&chosen, args.hidden * 2, least, most))?;
    }
    moe.close();
    session.close();
    Ok(SUCCESS)
}

/// What calls of each number of tokens take.
fn describe(chosen: &Multiprocessors, row_bytes: usize, least: usize, most: usize) -> String {
    let mut text = format!("{:>8} {:>10} {:>8}\n", "tokens", "dispatch", "combine");
    for tokens in
        std::iter::successors(Some(least.max(1)), |tokens| Some(tokens * 2)).take_while(|n| *n <= most)
    {
        let [dispatch, combine] =
            [Movement::Dispatch, Movement::Combine].map(|each| chosen.of(each, tokens * row_bytes));
        text += &format!("{tokens:>8} {dispatch:>10} {combine:>8}\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_of_tokens_is_shown() {
        let times = [(1 << 10, vec![(4, 10.0), (8, 5.0)]), (2 << 10, vec![(4, 11.0), (8, 4.0)])];
        let chosen = Multiprocessors::default().measured(Movement::Dispatch, &times);
        let text = describe(&chosen, 1 << 10, 1, 3);
        assert_eq!(
            text,
            "  tokens   dispatch  combine\n       1          8        8\n       2          8        8\n"
        );
    }
}
